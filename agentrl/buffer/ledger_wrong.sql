-- Finds contents that the program never writes; each row describes one error.
SELECT 'group ' || group_id || ' is lost, or not in the state that its last event names' FROM
    (SELECT group_id, to_state, max(seq) FROM events WHERE group_id IS NOT NULL GROUP BY group_id)
    LEFT JOIN groups USING (group_id) WHERE state IS NOT to_state
UNION ALL SELECT 'a group is lost' FROM (SELECT count(*) AS made, max(group_id) AS last FROM groups)
    WHERE made != ifnull(last, -1) + 1
UNION ALL SELECT 'group ' || group_id || ' has a value of a wrong type' FROM groups
    WHERE state NOT IN ('waiting', 'leased', 'completed', 'trained', 'dropped')
    OR (typeof(epoch), typeof(version), typeof(attempts)) != ('integer', 'integer', 'integer')
    OR (typeof(ifnull(prompt_index, 0)), typeof(ifnull(train_step, 0))) != ('integer', 'integer')
    OR (typeof(ifnull(completed, 0)), typeof(ifnull(tokens, 0))) != ('integer', 'integer')
UNION ALL SELECT 'the samples of group ' || group_id || ' are lost' FROM groups
    WHERE state = 'completed' AND group_id NOT IN (SELECT group_id FROM payloads)
    OR state IN ('waiting', 'leased') AND prompt_index IS NULL AND group_id NOT IN (SELECT group_id FROM starts)
UNION ALL SELECT 'the step of its checkpoint is ' || value FROM meta
    WHERE key = 'checkpoint' AND CAST(CAST(value AS INTEGER) AS TEXT) IS NOT value
LIMIT 3
