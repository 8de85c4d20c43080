-- Results of finished groups, by row of the prompt data. A ledger of this layout may lack the table.
CREATE TABLE IF NOT EXISTS results (
    prompt_index INTEGER NOT NULL, group_id INTEGER NOT NULL, version INTEGER NOT NULL, successes INTEGER NOT NULL,
    trials INTEGER NOT NULL, PRIMARY KEY (prompt_index, group_id)
) WITHOUT ROWID
