//! Janus's AudioBridge, through Janus's admin API: one request and one answer, nothing is kept between them.
//!
//! Rooms and forwarders belong to Janus, not to whoever made them: they outlive us, and end with Janus.

use std::fmt::{self, Write as _};
use std::net::Ipv4Addr;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// How long Janus may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer.
const ANSWER: u64 = 16 << 20;
const NO_SUCH_ROOM: u64 = 485;
const ROOM_EXISTS: u64 = 486;

/// Why Janus did not do what it should, by what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// It is down, or does not answer: wait.
    #[error("Janus does not answer")]
    Unreachable(#[source] Box<ureq::Error>),
    /// The room is not there: create it, or be content.
    #[error("Janus has no such room")]
    NoSuchRoom,
    /// It says no: see to the secrets, or to what was asked for.
    #[error("Janus refuses: {reason} ({code})")]
    Refused {
        /// Janus's number for it.
        code: u64,
        /// Janus's words for it.
        reason: String,
    },
    /// What it says is not understood: is it Janus?
    #[error("Janus answers with something else than was asked for: {0}")]
    Nonsense(String),
}

/// A room there.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Bridged {
    /// Its name.
    pub room: String,
    /// For people; ours say whose they are.
    #[serde(default)]
    pub description: String,
}

/// Somebody who gets the sound of a room.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Forwarder {
    /// Janus's number for it.
    pub stream_id: u64,
    /// Where it sends to.
    pub ip: String,
    /// And on which port.
    pub port: u16,
    /// What it marks the packets with.
    #[serde(default)]
    pub ssrc: u32,
    /// Whether it sends also when nobody is there.
    #[serde(default)]
    pub always_on: bool,
}

/// A Janus.
#[derive(Clone)]
pub struct Bridge {
    url: String,
    admin_secret: String,
    admin_key: String,
    agent: ureq::Agent,
}

/// Without the secrets.
impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bridge").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Bridge {
    /// The Janus whose admin API is at `url`, with Janus's `admin_secret` and AudioBridge's `admin_key`.
    pub fn new(url: &str, admin_secret: &str, admin_key: &str) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        Self {
            url: url.to_owned(),
            admin_secret: admin_secret.to_owned(),
            admin_key: admin_key.to_owned(),
            agent: agent.into(),
        }
    }

    /// What changing a room takes. Follows from the key and the room, so it need not be kept anywhere.
    pub fn secret(&self, room: &str) -> String {
        let parts = [self.admin_key.as_str(), "live-rooms room secret", room];
        let digests = parts.map(Sha256::digest);
        let secret = Sha256::digest(digests.concat());
        secret.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// The rooms there are.
    pub async fn rooms(&self) -> Result<Vec<Bridged>, BridgeError> {
        part(self.ask(json!({ "request": "list" })).await?, "list")
    }

    /// Creates a room, or finds that it is there.
    pub async fn create(&self, room: &str, description: &str) -> Result<(), BridgeError> {
        let asked = self.ask(json!({
            "request": "create",
            "admin_key": self.admin_key,
            "room": room,
            "description": description,
            "secret": self.secret(room),
            "permanent": false,
            "is_private": false, // else it would not be listed
            "sampling_rate": 48000,
            "allow_rtp_participants": true,
        }));
        match asked.await {
            Err(BridgeError::Refused { code: ROOM_EXISTS, .. }) => Ok(()),
            asked => asked.map(drop),
        }
    }

    /// Removes a room with all its forwarders, or finds that it is gone.
    pub async fn destroy(&self, room: &str) -> Result<(), BridgeError> {
        let secret = self.secret(room);
        let asked = self.ask(json!({ "request": "destroy", "room": room, "secret": secret }));
        match asked.await {
            Err(BridgeError::NoSuchRoom) => Ok(()),
            asked => asked.map(drop),
        }
    }

    /// Who gets the sound of a room.
    pub async fn forwarders(&self, room: &str) -> Result<Vec<Forwarder>, BridgeError> {
        let secret = self.secret(room);
        let asked = json!({ "request": "listforwarders", "room": room, "secret": secret });
        part(self.ask(asked).await?, "rtp_forwarders")
    }

    /// Has the sound of a room sent there, also when nobody is in it. Asked twice, it is sent twice.
    pub async fn forward(
        &self,
        room: &str,
        host: Ipv4Addr,
        port: u16,
        ssrc: u32,
    ) -> Result<(), BridgeError> {
        let asked = self.ask(json!({
            "request": "rtp_forward",
            "admin_key": self.admin_key,
            "room": room,
            "secret": self.secret(room),
            "host": host.to_string(),
            "port": port,
            "codec": "opus",
            "ptype": 100,
            "ssrc": ssrc,
            "always_on": true,
        }));
        asked.await.map(drop)
    }

    /// Ends a forwarder, or finds that it is gone.
    pub async fn stop_forward(&self, room: &str, stream_id: u64) -> Result<(), BridgeError> {
        let asked = self.ask(json!({
            "request": "stop_rtp_forward",
            "admin_key": self.admin_key,
            "room": room,
            "secret": self.secret(room),
            "stream_id": stream_id,
        }));
        match asked.await {
            Err(BridgeError::NoSuchRoom) => Ok(()),
            asked => asked.map(drop),
        }
    }

    /// Plays an Opus file to a room, again and again, unless it is being played.
    pub async fn play(&self, room: &str, file: &str, name: &str) -> Result<(), BridgeError> {
        let ask = |request: &str, more: Value| {
            let mut asked = json!({
                "request": request,
                "admin_key": self.admin_key,
                "room": room,
                "secret": self.secret(room),
                "file_id": name,
            });
            if let (Some(asked), Value::Object(more)) = (asked.as_object_mut(), more) {
                asked.extend(more);
            }
            self.ask(asked)
        };
        let playing = ask("is_playing", json!({})).await?;
        if playing.get("playing") == Some(&Value::Bool(true)) {
            return Ok(());
        }
        ask("play_file", json!({ "filename": file, "loop": true })).await.map(drop)
    }

    /// Asks the plugin. Its own errors come as successes of Janus.
    async fn ask(&self, request: Value) -> Result<Value, BridgeError> {
        let body = json!({
            "janus": "message_plugin",
            "transaction": format!("{:016x}", fastrand::u64(..)),
            "admin_secret": self.admin_secret,
            "plugin": "janus.plugin.audiobridge",
            "request": request,
        });
        let (agent, url) = (self.agent.clone(), self.url.clone());
        let answered = tokio::task::spawn_blocking(move || {
            let mut answer = agent.post(&url).send_json(body)?;
            let status = answer.status().as_u16();
            let text = answer.body_mut().with_config().limit(ANSWER).read_to_string()?;
            Ok::<_, ureq::Error>((status, text))
        });
        let (status, text) = answered
            .await
            .map_err(|error| BridgeError::Nonsense(error.to_string()))?
            .map_err(|error| BridgeError::Unreachable(Box::new(error)))?;
        let nonsense = || BridgeError::Nonsense(format!("{status} {}", first(&text)));
        let mut answer: Value = serde_json::from_str(&text).map_err(|_| nonsense())?;
        if let Some(error) = answer.get("error") {
            let code = error.get("code").and_then(Value::as_u64).unwrap_or(0);
            let reason = error.get("reason").and_then(Value::as_str).unwrap_or("?").to_owned();
            return Err(BridgeError::Refused { code, reason });
        }
        let answer = answer.get_mut("response").map(Value::take).ok_or_else(nonsense)?;
        match answer.get("error_code").and_then(Value::as_u64) {
            None => Ok(answer),
            Some(NO_SUCH_ROOM) => Err(BridgeError::NoSuchRoom),
            Some(code) => {
                let reason = answer.get("error").and_then(Value::as_str).unwrap_or("?").to_owned();
                Err(BridgeError::Refused { code, reason })
            }
        }
    }
}

/// One field of an answer.
fn part<T: for<'a> Deserialize<'a>>(mut answer: Value, name: &str) -> Result<T, BridgeError> {
    let part = answer.get_mut(name).map(Value::take).unwrap_or_default();
    serde_json::from_value(part).map_err(|error| BridgeError::Nonsense(format!("{name}: {error}")))
}

fn first(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_the_same_for_every_manager_with_the_key_and_for_no_other_room() {
        let bridge = |key| Bridge::new("http://127.0.0.1:1/admin", "s", key);
        assert_eq!(bridge("k").secret("a"), bridge("k").secret("a"));
        assert_ne!(bridge("k").secret("a"), bridge("k").secret("b"));
        assert_ne!(bridge("k").secret("a"), bridge("l").secret("a"));
        assert_eq!(bridge("k").secret("a").len(), 64);
        let shown = format!("{:?}", bridge("top-secret"));
        assert!(!shown.contains("top-secret"), "{shown}");
    }
}
