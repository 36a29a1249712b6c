//! A client for HTTP/1.1 that sends exactly the bytes it is given.

use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// An answer; of one that goes on (chunks), `body` is what was read so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case, in the order they came.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn chunked(&self) -> bool {
        self.header("transfer-encoding") == Some("chunked")
    }
}

/// A connection that is kept for the next request.
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

/// What a request looks like on the wire.
pub(crate) fn request(
    host: SocketAddr,
    method: &str,
    target: &str,
    content_type: Option<&str>,
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {target} HTTP/1.1
Host: {host}
"
    )
    .into_bytes();
    if let Some(content_type) = content_type {
        bytes.extend(format!("Content-Type: {content_type}\r\n").bytes());
    }
    if !body.is_empty() || !matches!(method, "GET" | "HEAD") {
        bytes.extend(format!("Content-Length: {}\r\n", body.len()).bytes());
    }
    bytes.extend(b"\r\n");
    bytes.extend(body);
    bytes
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends bytes and reads the whole answer.
    pub(crate) async fn exchange(&mut self, bytes: &[u8]) -> std::io::Result<Answer> {
        let mut answer = self.begin(bytes).await?;
        if bytes.starts_with(b"HEAD ") {
            return Ok(answer);
        }
        if answer.chunked() {
            while let Some(chunk) = self.chunk().await? {
                answer.body.extend(chunk);
            }
        } else if let Some(length) = answer.header("content-length") {
            answer.body = vec![0; length.parse().map_err(std::io::Error::other)?];
            self.stream.read_exact(&mut answer.body).await?;
        } else if answer.header("connection") == Some("close") {
            self.stream.read_to_end(&mut answer.body).await?;
        }
        Ok(answer)
    }

    /// Sends bytes and reads the head of the answer.
    pub(crate) async fn begin(&mut self, bytes: &[u8]) -> std::io::Result<Answer> {
        self.stream.get_mut().write_all(bytes).await?;
        let mut answer = Answer::default();
        let line = self.line().await?;
        answer.status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        loop {
            let line = self.line().await?;
            let Some((name, value)) = line.split_once(':') else { return Ok(answer) };
            answer.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// The next chunk of an answer that goes on; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let line = self.line().await?;
        let size = usize::from_str_radix(&line, 16)
            .map_err(|_| std::io::Error::other(format!("a chunk's size: {line:?}")))?;
        let mut bytes = vec![0; size];
        self.stream.read_exact(&mut bytes).await?;
        self.line().await?;
        Ok((size > 0).then_some(bytes))
    }

    async fn line(&mut self) -> std::io::Result<String> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line).await?;
        if line.pop() != Some(b'\n') {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(String::from_utf8_lossy(&line).into_owned())
    }
}

/// One GET on a connection of its own.
pub(crate) async fn get(address: SocketAddr, target: &str) -> std::io::Result<Answer> {
    Connection::open(address).await?.exchange(&request(address, "GET", target, None, b"")).await
}
