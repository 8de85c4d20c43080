-- Converts layout 2, in which `step` was a group's version, to this layout.
ALTER TABLE groups RENAME COLUMN step TO version;
DROP INDEX groups_by_step;
CREATE INDEX groups_by_version ON groups (version, state);
ALTER TABLE events ADD COLUMN version INTEGER;
UPDATE events SET version=step, step=NULL WHERE to_state NOT IN ('trained', 'recover')
    AND ifnull(reason, '') NOT IN ('after the checkpoint', 'samples pruned', 'weights of another life', 'the run stopped');
UPDATE meta SET value='3' WHERE key='schema'
