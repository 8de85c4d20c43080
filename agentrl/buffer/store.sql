CREATE TABLE groups (key INTEGER PRIMARY KEY AUTOINCREMENT, kind, name, step, data BLOB NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY AUTOINCREMENT, {columns},
    staleness GENERATED ALWAYS AS (CASE WHEN kind='train' THEN max(step - oldest, 0) END) VIRTUAL
);
CREATE TABLE details (step INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE INDEX trajectories_by_step ON trajectories (kind, name, step);
CREATE INDEX trajectories_by_key ON trajectories (key);
CREATE INDEX groups_by_step ON groups (kind, name, step);
PRAGMA user_version={layout};
