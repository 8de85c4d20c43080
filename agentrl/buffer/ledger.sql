-- The tables of a ledger. `agentrl.buffer.sqlite` has the layout's number; `ledger_from_2.sql` converts the older layout.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, prompt_index INTEGER, state TEXT NOT NULL, reason TEXT,
    version INTEGER NOT NULL, train_step INTEGER, attempts INTEGER NOT NULL, completed INTEGER, tokens INTEGER,
    created_at REAL NOT NULL, updated_at REAL NOT NULL
);
CREATE INDEX groups_by_state ON groups (state, train_step, completed);
CREATE INDEX groups_by_version ON groups (version, state);
CREATE TABLE starts (group_id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE payloads (group_id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER, from_state TEXT, to_state TEXT NOT NULL, step INTEGER,
    run_id TEXT NOT NULL, at REAL NOT NULL, reason TEXT, version INTEGER
);
CREATE INDEX events_by_group ON events (group_id, seq);
