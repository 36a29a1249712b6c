//! The RTP ports of a mixer: each is even, and the next one, for RTCP, goes with it.
//!
//! A port is free if nobody here has it, nobody else listens on the pair, and nobody sends to it: a forwarder
//! that was not stopped in time would bring one room's sound into another. Janus sends for every room that
//! it forwards, also for an empty one, so a moment of listening tells.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::UdpSocket;

/// Several packets are due in that time, where there is a forwarder.
const LISTEN: Duration = Duration::from_millis(150);

/// The ports that a mixer may use, `42000-42199`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ports(RangeInclusive<u16>);

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let why = || format!("{text:?} is no range of ports: give two like 42000-42199");
        let (first, last) = text.split_once('-').ok_or_else(why)?;
        let (first, last): (u16, u16) =
            (first.parse().map_err(|_| why())?, last.parse().map_err(|_| why())?);
        let range = Self(first..=last);
        if first == 0 || range.pairs() == 0 { Err(why()) } else { Ok(range) }
    }
}

impl Ports {
    fn first(&self) -> u32 {
        u32::from(*self.0.start()).next_multiple_of(2)
    }

    /// How many rooms they are enough for.
    pub fn pairs(&self) -> u32 {
        (u32::from(*self.0.end()) + 1).saturating_sub(self.first()) / 2
    }

    fn pair(&self, number: u32) -> u16 {
        u16::try_from(self.first() + number * 2).unwrap_or(0)
    }
}

/// Lends ports.
#[derive(Debug, Clone)]
pub struct Pool {
    host: Ipv4Addr,
    ports: Ports,
    lent: Arc<Mutex<Lent>>,
}

#[derive(Debug, Default)]
struct Lent {
    ports: BTreeSet<u16>,
    /// The one after the last that was lent: a port that was given back is the last to be lent again.
    next: u32,
}

/// A port that was lent, until it is dropped: that must be after whatever uses it has ended.
#[derive(Debug)]
pub struct Port {
    number: u16,
    lent: Arc<Mutex<Lent>>,
}

impl Port {
    /// The even one.
    pub fn number(&self) -> u16 {
        self.number
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.lent.lock().ports.remove(&self.number);
    }
}

impl Pool {
    /// Ports on this address.
    pub fn new(host: Ipv4Addr, ports: Ports) -> Self {
        Self { host, ports, lent: Arc::default() }
    }

    /// One that is free, if there is one.
    pub async fn take(&self) -> Option<Port> {
        for _ in 0..self.ports.pairs() {
            let port = self.candidate()?;
            if is_free(self.host, port.number).await.unwrap_or(false) {
                return Some(port);
            }
            tracing::info!(port = port.number, "somebody else uses this port");
        }
        None
    }

    /// How many are lent.
    pub fn lent(&self) -> usize {
        self.lent.lock().ports.len()
    }

    /// The next one that nobody here has.
    fn candidate(&self) -> Option<Port> {
        let mut lent = self.lent.lock();
        let pairs = self.ports.pairs();
        let turns = (0..pairs).map(|turn| (lent.next + turn) % pairs);
        let turn = turns.into_iter().find(|turn| !lent.ports.contains(&self.ports.pair(*turn)))?;
        let number = self.ports.pair(turn);
        lent.next = (turn + 1) % pairs;
        lent.ports.insert(number);
        Some(Port { number, lent: Arc::clone(&self.lent) })
    }
}

/// Whether nobody listens on a pair or sends to it.
async fn is_free(host: Ipv4Addr, port: u16) -> io::Result<bool> {
    let rtp = UdpSocket::bind(SocketAddrV4::new(host, port)).await?;
    let _rtcp = UdpSocket::bind(SocketAddrV4::new(host, port + 1)).await?;
    let heard = tokio::time::timeout(LISTEN, rtp.recv(&mut [0; 1])).await;
    Ok(heard.is_err())
}

/// Whether somebody listens on a port.
pub fn is_bound(port: u16) -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/net/udp") else { return true }; // it cannot be known
    let local = |line: &str| {
        let address = line.split_whitespace().nth(1)?;
        u16::from_str_radix(address.split_once(':')?.1, 16).ok()
    };
    table.lines().skip(1).filter_map(local).any(|bound| bound == port)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

    /// Pairs that nobody is given by the system. Tests of other processes may take some: so these are many more
    /// than a test needs.
    fn pool() -> Pool {
        let first = 8_000 + fastrand::u16(..10) * 200;
        Pool::new(HOST, Ports(first..=first + 199))
    }

    #[test]
    fn a_range_is_of_whole_pairs() {
        let pairs = |text: &str| text.parse::<Ports>().unwrap().pairs();
        assert_eq!((pairs("42000-42199"), pairs("42001-42004"), pairs("65534-65535")), (100, 1, 1));
        for text in ["", "42000", "42001-42002", "0-7", "7-5", "1-70000", "a-b"] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
        let ports: Ports = "42001-42006".parse().unwrap();
        assert_eq!((ports.pair(0), ports.pair(1), ports.pairs()), (42002, 42004, 2));
    }

    #[tokio::test]
    async fn a_port_is_lent_once_and_one_that_was_given_back_is_the_last_to_be_lent_again() {
        let pool = pool();
        let first = pool.take().await.unwrap();
        let number = first.number();
        assert_eq!(number % 2, 0);
        drop(first);
        let second = pool.take().await.unwrap();
        assert_ne!(second.number(), number);
        assert_eq!(pool.lent(), 1);
        drop(second);
        assert_eq!(pool.lent(), 0);
    }

    #[tokio::test]
    async fn a_pair_of_which_somebody_has_one_or_sends_to_one_is_not_lent() {
        let many = pool();
        // Between a look and this anybody may take a port.
        let a_half = async |of: u16| loop {
            let first = many.take().await.expect("there are many").number();
            if let Ok(held) = std::net::UdpSocket::bind((HOST, first + of)) {
                break (first, held);
            }
        };
        for of in [0, 1] {
            let (first, held) = a_half(of).await;
            assert!(is_bound(first + of));
            let pool = Pool::new(HOST, Ports(first..=first + 1));
            assert!(pool.take().await.is_none(), "{} is not ours", first + of);
            drop(held);
        }
        let first = many.take().await.unwrap().number();
        let pool = Pool::new(HOST, Ports(first..=first + 1));
        let sending = tokio::spawn(async move {
            let socket = UdpSocket::bind((HOST, 0)).await.unwrap();
            loop {
                let _ = socket.send_to(b"rtp", (HOST, first)).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(pool.take().await.is_none(), "somebody sends to it");
        sending.abort();
        let _ = sending.await;
        let port = pool.take().await.expect("it is free");
        assert!(pool.take().await.is_none(), "there is no other");
        assert_eq!(pool.lent(), 1);
        drop(port);
    }
}
