//! From a proof to a name, a role and a scope.
//!
//! ```text
//!  name, password ──► session ──each request──► identity ──► ended: idle, old, signed out, user changed
//! ```

use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension as _};

use crate::audit::{Entry, Outcome};
use crate::secret::{Secret, hash};
use crate::store::{millis, time};
use crate::token::BEGINNING;
use crate::user::role;
use crate::{Access, AccessError, Role, Scope, password};

/// A session that nobody used for so long is over.
const IDLE: Duration = Duration::from_secs(8 * 3600);
/// And each is after so long.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Sessions of a user; with more of them the oldest goes.
const MOST: i64 = 32;
/// How exactly it is known when somebody was last seen.
const SEEN: Duration = Duration::from_secs(60);
/// A lent token that was not used for so long is nobody's any more.
const UNUSED: Duration = Duration::from_secs(3600);
/// What is longer proves nothing.
const LONGEST_PROOF: usize = 128;

/// Who somebody is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// A user, or a token's name.
    pub name: String,
    /// What they may do.
    pub role: Role,
    /// Where: everywhere, unless a token says less.
    pub scope: Scope,
    /// How they proved it.
    pub proof: Proof,
    /// Until when that is good, if it ends by itself.
    pub expires: Option<SystemTime>,
}

/// How somebody proved who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// They signed in.
    Session,
    /// They have a token.
    Token,
    /// They have a token that a server lent to all that it started.
    Lent,
}

/// Somebody has signed in.
#[derive(Debug, Clone)]
pub struct Session {
    /// The id of the session, for its owner.
    pub id: Secret,
    /// Who it is.
    pub identity: Identity,
}

/// A token for the processes that this one starts.
#[derive(Debug)]
pub(crate) struct Lent {
    hash: [u8; 32],
    name: String,
    role: Role,
    used: SystemTime,
}

impl Access {
    /// Signs somebody in if the password is theirs; `old` is the session they come with, which ends. An unknown
    /// user takes as long as a wrong password. The entry in the audit log says where from.
    pub fn sign_in(
        &self,
        name: &str,
        password: &str,
        old: Option<&str>,
        source: &str,
        now: SystemTime,
    ) -> Result<Option<Session>, AccessError> {
        let stored = self.password_of(name)?;
        let is_theirs = password::verify(password, stored.as_deref());
        let Some(stored) = stored.filter(|_| is_theirs) else {
            self.record(&[(self.refused(name, source)?, 1)], now)?;
            return Ok(None);
        };
        let id = Secret::random("")?;
        let entry = Entry {
            who: name.to_owned(),
            source: source.to_owned(),
            action: "sign-in".into(),
            target: String::new(),
            outcome: Outcome::Done,
        };
        let role = self.change(&entry, |tx| {
            let millis_now = millis(now);
            // What was hashed may be another password by now.
            let sql = "UPDATE user SET used = ?3
                       WHERE name = ?1 AND password = ?2 AND NOT disabled RETURNING id, role";
            let found = tx.query_row(sql, (name, &stored, millis_now), |row| {
                Ok((row.get::<_, i64>(0)?, role(row.get(1)?)?))
            });
            let Some((user, role)) = found.optional()? else {
                return Err(AccessError::NoSuch("user", name.to_owned()));
            };
            forget(tx, now)?;
            if let Some(old) = old {
                tx.execute("DELETE FROM session WHERE hash = ?1", [hash(old)])?;
            }
            let sql = "DELETE FROM session WHERE user = ?1 AND hash NOT IN
                       (SELECT hash FROM session WHERE user = ?1 ORDER BY created DESC LIMIT ?2)";
            tx.execute(sql, (user, MOST - 1))?;
            let sql = "INSERT INTO session (hash, user, created, seen) VALUES (?1, ?2, ?3, ?3)";
            tx.execute(sql, (hash(id.reveal()), user, millis_now))?;
            Ok(role)
        });
        let role = match role {
            Err(AccessError::NoSuch(..)) => return Ok(None),
            role => role?,
        };
        let (name, expires) = (name.to_owned(), Some(now + LONGEST));
        let (scope, proof) = (Scope::All, Proof::Session);
        Ok(Some(Session { id, identity: Identity { name, role, scope, proof, expires } }))
    }

    fn password_of(&self, name: &str) -> Result<Option<String>, AccessError> {
        let connection = self.inner.read.lock();
        let sql = "SELECT password FROM user WHERE name = ?1 AND NOT disabled";
        Ok(connection.query_row(sql, [name], |row| row.get(0)).optional()?)
    }

    /// A name that nobody has is not written down: it may be a password in the wrong field.
    fn refused(&self, name: &str, source: &str) -> Result<Entry, AccessError> {
        let connection = self.inner.read.lock();
        let known = "SELECT name FROM user WHERE name = ?1";
        let known = connection.query_row(known, [name], |row| row.get::<_, String>(0));
        Ok(Entry {
            who: known.optional()?.unwrap_or_else(|| "?".to_owned()),
            source: source.to_owned(),
            action: "sign-in".into(),
            target: String::new(),
            outcome: Outcome::Refused,
        })
    }

    /// Ends a session.
    pub fn sign_out(&self, id: &str, source: &str, now: SystemTime) -> Result<(), AccessError> {
        let Some(identity) = self.by_session(id, now)? else { return Ok(()) };
        let entry = Entry {
            who: identity.name,
            source: source.to_owned(),
            action: "sign-out".into(),
            target: String::new(),
            outcome: Outcome::Done,
        };
        self.change(&entry, |tx| {
            tx.execute("DELETE FROM session WHERE hash = ?1", [hash(id)])?;
            Ok(())
        })
    }

    /// Whose session it is; with that it is in use.
    pub fn by_session(&self, id: &str, now: SystemTime) -> Result<Option<Identity>, AccessError> {
        self.session(id, now, true)
    }

    /// The same of somebody who only listens: that is no use of it, and one that is idle ends.
    pub fn by_idle_session(
        &self,
        id: &str,
        now: SystemTime,
    ) -> Result<Option<Identity>, AccessError> {
        self.session(id, now, false)
    }

    fn session(
        &self,
        id: &str,
        now: SystemTime,
        is_use: bool,
    ) -> Result<Option<Identity>, AccessError> {
        if id.len() > LONGEST_PROOF {
            return Ok(None);
        }
        let hash = hash(id);
        let found = {
            let connection = self.inner.read.lock();
            let sql = "SELECT name, role, session.created, seen
                       FROM session JOIN user ON user.id = session.user
                       WHERE hash = ?1 AND NOT disabled";
            let mut statement = connection.prepare_cached(sql)?;
            let row = statement.query_row([hash], |row| {
                let (created, seen) = (time(row.get(2)?), time(row.get(3)?));
                Ok((row.get(0)?, role(row.get(1)?)?, created, seen))
            });
            row.optional()?
        };
        let Some((name, role, created, seen)) = found else { return Ok(None) };
        if now >= seen + IDLE || now >= created + LONGEST {
            return Ok(None);
        }
        if is_use && now >= seen + SEEN {
            self.seen("UPDATE session SET seen = ?2 WHERE hash = ?1", hash, now);
        }
        let expires = Some((created + LONGEST).min(now + IDLE));
        Ok(Some(Identity { name, role, scope: Scope::All, proof: Proof::Session, expires }))
    }

    /// Whose token it is.
    pub fn by_token(&self, token: &str, now: SystemTime) -> Result<Option<Identity>, AccessError> {
        if token.len() > LONGEST_PROOF {
            return Ok(None);
        }
        let hash = hash(token);
        let lent = self.lent(hash, now);
        if let Some((name, role, is_new)) = lent {
            if is_new {
                self.seen("UPDATE lent SET used = ?2 WHERE hash = ?1", hash, now);
            }
            let (scope, proof) = (Scope::All, Proof::Lent);
            return Ok(Some(Identity { name, role, scope, proof, expires: None }));
        }
        let found = {
            let connection = self.inner.read.lock();
            let sql = "SELECT name, role, expires, used, scope FROM token WHERE hash = ?1";
            let mut statement = connection.prepare_cached(sql)?;
            let row = statement.query_row([hash], |row| {
                let (expires, used): (Option<i64>, Option<i64>) = (row.get(2)?, row.get(3)?);
                let (role, scope) = (role(row.get(1)?)?, Scope::stored(row.get(4)?));
                Ok((row.get(0)?, role, scope, expires.map(time), used.map(time)))
            });
            row.optional()?
        };
        let Some((name, role, scope, expires, used)) = found else { return Ok(None) };
        if expires.is_some_and(|end| end <= now) {
            return Ok(None);
        }
        if used.is_none_or(|used| now >= used + SEEN) {
            self.seen("UPDATE token SET used = ?2 WHERE hash = ?1", hash, now);
        }
        Ok(Some(Identity { name, role, scope, proof: Proof::Token, expires }))
    }

    /// The name and the role of a lent token, and whether its use is news.
    fn lent(&self, hash: [u8; 32], now: SystemTime) -> Option<(String, Role, bool)> {
        let mut all = self.inner.lent.lock();
        let lent = all.iter_mut().find(|lent| lent.hash == hash)?;
        let is_new = now >= lent.used + SEEN;
        if is_new {
            lent.used = now;
        }
        Some((lent.name.clone(), lent.role, is_new))
    }

    /// A token for what this process starts. It is good until it is taken back. Those that a process lent
    /// which was killed stay good while they are used: what it started may still run, and be this one's now; but
    /// with no higher role than this.
    pub fn lend(&self, name: &str, role: Role) -> Result<Secret, AccessError> {
        let (secret, now) = (Secret::random(BEGINNING)?, SystemTime::now());
        let own = Lent { hash: hash(secret.reveal()), name: name.to_owned(), role, used: now };
        let mut all = self.keep(|tx| {
            let unused = millis(now.checked_sub(UNUSED).unwrap_or(std::time::UNIX_EPOCH));
            tx.execute("DELETE FROM lent WHERE used < ?1", [unused])?;
            let mut statement = tx.prepare("SELECT hash, name, role, used FROM lent")?;
            let rows = statement.query_map([], |row| {
                let lent = self::role(row.get(2)?)?.min(role);
                let used = time(row.get(3)?);
                Ok(Lent { hash: row.get(0)?, name: row.get(1)?, role: lent, used })
            })?;
            let all = rows.collect::<rusqlite::Result<Vec<Lent>>>()?;
            let sql = "INSERT INTO lent (hash, name, role, used) VALUES (?1, ?2, ?3, ?4)";
            tx.execute(sql, (own.hash, name, role.word(), millis(now)))?;
            Ok(all)
        })?;
        all.push(own);
        *self.inner.lent.lock() = all;
        Ok(secret)
    }

    /// Ends all tokens that were lent.
    pub fn take_back(&self) -> Result<(), AccessError> {
        let lent = std::mem::take(&mut *self.inner.lent.lock());
        if lent.is_empty() {
            return Ok(());
        }
        self.keep(|tx| Ok(tx.execute("DELETE FROM lent", []).map(drop)?))
    }

    /// Notes that somebody was there. Nobody waits for it, not for others that write either, and it matters little
    /// when it fails.
    fn seen(&self, sql: &'static str, hash: [u8; 32], now: SystemTime) {
        if let Some(connection) = self.inner.seen.try_lock() {
            let _ = connection.execute(sql, (hash, millis(now)));
        }
    }
}

/// Removes sessions that are over.
fn forget(connection: &Connection, now: SystemTime) -> rusqlite::Result<()> {
    let before = |age| millis(now.checked_sub(age).unwrap_or(std::time::UNIX_EPOCH));
    let sql = "DELETE FROM session WHERE seen <= ?1 OR created <= ?2";
    connection.execute(sql, (before(IDLE), before(LONGEST))).map(drop)
}
