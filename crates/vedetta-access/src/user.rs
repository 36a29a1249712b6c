//! Users.

use std::time::SystemTime;

use rusqlite::{OptionalExtension as _, Transaction};
use serde::{Serialize, Serializer};

use crate::audit::Entry;
use crate::store::{check_name, is_taken, millis, time};
use crate::{Access, AccessError, Role, password};

/// Somebody who can sign in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct User {
    /// Exactly as it is typed.
    pub name: String,
    /// What they may do.
    pub role: Role,
    /// They cannot sign in at present.
    pub disabled: bool,
    /// Since when there is such a user.
    #[serde(serialize_with = "stamp")]
    pub created: SystemTime,
    /// When they signed in last.
    #[serde(serialize_with = "maybe_stamp")]
    pub used: Option<SystemTime>,
}

/// A time, to the millisecond.
pub(crate) fn stamp<S: Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&humantime::format_rfc3339_millis(*at))
}

#[expect(clippy::ref_option, reason = "serde hands out references")]
pub(crate) fn maybe_stamp<S: Serializer>(
    at: &Option<SystemTime>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => stamp(at, to),
        None => to.serialize_none(),
    }
}

impl Access {
    /// All users, by name.
    pub fn users(&self) -> Result<Vec<User>, AccessError> {
        let connection = self.inner.read.lock();
        let sql = "SELECT name, role, disabled, created, used FROM user ORDER BY name";
        let mut statement = connection.prepare(sql)?;
        let rows = statement.query_map([], |row| {
            Ok(User {
                name: row.get(0)?,
                role: role(row.get(1)?)?,
                disabled: row.get(2)?,
                created: time(row.get(3)?),
                used: row.get::<_, Option<i64>>(4)?.map(time),
            })
        })?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Adds a user. Hashing takes a moment.
    pub fn add_user(&self, name: &str, password: &str, role: Role) -> Result<(), AccessError> {
        check_name("user", name)?;
        password::check(password)?;
        let hash = password::hash(password)?;
        self.change(&Entry::shell("user add", format!("{name} as {role}")), |tx| {
            let sql = "INSERT INTO user (name, role, password, created) VALUES (?1, ?2, ?3, ?4)";
            let row = (name, role.word(), &hash, millis(SystemTime::now()));
            match tx.execute(sql, row) {
                Ok(_) => Ok(()),
                Err(error) if is_taken(&error) => Err(AccessError::Exists("user", name.to_owned())),
                Err(error) => Err(error.into()),
            }
        })
    }

    /// Gives a user another password, and ends their sessions.
    pub fn set_password(&self, name: &str, password: &str) -> Result<(), AccessError> {
        password::check(password)?;
        let hash = password::hash(password)?;
        self.change(&Entry::shell("user passwd", name), |tx| {
            let user = known(tx, name)?;
            tx.execute("UPDATE user SET password = ?2 WHERE id = ?1", (user, &hash))?;
            end_sessions(tx, user)
        })
    }

    /// Gives a user another role, and ends their sessions.
    pub fn set_role(&self, name: &str, role: Role) -> Result<(), AccessError> {
        self.change(&Entry::shell("user role", format!("{name} as {role}")), |tx| {
            let user = known(tx, name)?;
            tx.execute("UPDATE user SET role = ?2 WHERE id = ?1", (user, role.word()))?;
            end_sessions(tx, user)
        })
    }

    /// Lets a user sign in or not; ends their sessions.
    pub fn set_disabled(&self, name: &str, disabled: bool) -> Result<(), AccessError> {
        let action = if disabled { "user disable" } else { "user enable" };
        self.change(&Entry::shell(action, name), |tx| {
            let user = known(tx, name)?;
            tx.execute("UPDATE user SET disabled = ?2 WHERE id = ?1", (user, disabled))?;
            end_sessions(tx, user)
        })
    }

    /// Removes a user with all sessions.
    pub fn remove_user(&self, name: &str) -> Result<(), AccessError> {
        self.change(&Entry::shell("user remove", name), |tx| {
            let user = known(tx, name)?;
            end_sessions(tx, user)?;
            tx.execute("DELETE FROM user WHERE id = ?1", [user])?;
            Ok(())
        })
    }
}

/// A stored role; one that nobody knows is none.
pub(crate) fn role(word: String) -> rusqlite::Result<Role> {
    word.parse().map_err(|_| rusqlite::Error::InvalidColumnName(word))
}

fn known(tx: &Transaction<'_>, name: &str) -> Result<i64, AccessError> {
    let found = tx.query_row("SELECT id FROM user WHERE name = ?1", [name], |row| row.get(0));
    found.optional()?.ok_or_else(|| AccessError::NoSuch("user", name.to_owned()))
}

fn end_sessions(tx: &Transaction<'_>, user: i64) -> Result<(), AccessError> {
    tx.execute("DELETE FROM session WHERE user = ?1", [user])?;
    Ok(())
}
