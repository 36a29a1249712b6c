//! API tokens.

use std::fmt::Write as _;
use std::time::SystemTime;

use serde::Serialize;

use crate::audit::Entry;
use crate::secret::{Secret, hash};
use crate::store::{check_name, is_taken, millis, time};
use crate::user::{maybe_stamp, role, stamp};
use crate::{Access, AccessError, Role, Scope};

/// So that it is known for what it is where it should not be.
pub(crate) const BEGINNING: &str = "vdt_";

/// What is known of a token; not the token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Token {
    /// What it is called.
    pub name: String,
    /// What its holder may do.
    pub role: Role,
    /// Where.
    pub scope: Scope,
    /// Since when it is good.
    #[serde(serialize_with = "stamp")]
    pub created: SystemTime,
    /// Until when.
    #[serde(serialize_with = "maybe_stamp")]
    pub expires: Option<SystemTime>,
    /// When it was used last, to the minute.
    #[serde(serialize_with = "maybe_stamp")]
    pub used: Option<SystemTime>,
}

impl Token {
    /// It is no longer good.
    pub fn is_over(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|end| end <= now)
    }
}

impl Access {
    /// All tokens, by name.
    pub fn tokens(&self) -> Result<Vec<Token>, AccessError> {
        let connection = self.inner.read.lock();
        let sql = "SELECT name, role, created, expires, used, scope FROM token ORDER BY name";
        let mut statement = connection.prepare(sql)?;
        let rows = statement.query_map([], |row| {
            Ok(Token {
                name: row.get(0)?,
                role: role(row.get(1)?)?,
                created: time(row.get(2)?),
                expires: row.get::<_, Option<i64>>(3)?.map(time),
                used: row.get::<_, Option<i64>>(4)?.map(time),
                scope: Scope::stored(row.get(5)?),
            })
        })?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// Makes a token. Nobody can see it again.
    pub fn add_token(
        &self,
        name: &str,
        role: Role,
        scope: &Scope,
        expires: Option<SystemTime>,
    ) -> Result<Secret, AccessError> {
        check_name("token", name)?;
        let secret = Secret::random(BEGINNING)?;
        let mut target = format!("{name} as {role}");
        if *scope != Scope::All {
            let _ = write!(target, " for {scope}");
        }
        let entry = Entry::shell("token add", target);
        self.change(&entry, |tx| {
            let sql = "INSERT INTO token (name, role, hash, created, expires, scope)
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            let row = (
                name,
                role.word(),
                hash(secret.reveal()),
                millis(SystemTime::now()),
                expires.map(millis),
                scope.to_string(),
            );
            match tx.execute(sql, row) {
                Ok(_) => Ok(()),
                Err(error) if is_taken(&error) => {
                    Err(AccessError::Exists("token", name.to_owned()))
                }
                Err(error) => Err(error.into()),
            }
        })?;
        Ok(secret)
    }

    /// Makes a token good for more or less than it was.
    pub fn set_scope(&self, name: &str, scope: &Scope) -> Result<(), AccessError> {
        self.change(&Entry::shell("token scope", format!("{name} for {scope}")), |tx| {
            let sql = "UPDATE token SET scope = ?2 WHERE name = ?1";
            match tx.execute(sql, (name, scope.to_string()))? {
                0 => Err(AccessError::NoSuch("token", name.to_owned())),
                _ => Ok(()),
            }
        })
    }

    /// Ends a token.
    pub fn revoke_token(&self, name: &str) -> Result<(), AccessError> {
        self.change(&Entry::shell("token revoke", name), |tx| {
            match tx.execute("DELETE FROM token WHERE name = ?1", [name])? {
                0 => Err(AccessError::NoSuch("token", name.to_owned())),
                _ => Ok(()),
            }
        })
    }
}
