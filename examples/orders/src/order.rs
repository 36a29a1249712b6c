//! What an order is, and what is done for it.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use vedetta::core::Backoff;
use vedetta::stage::{BoxError, Entity, Limits, Stage, Version, Visit};

/// An order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) id: i64,
    pub(crate) version: Version,
    pub(crate) cents: i64,
    pub(crate) state: State,
    pub(crate) is_invoiced: bool,
}

impl Order {
    /// A new one, of no version yet.
    pub(crate) fn placed(id: i64, cents: i64) -> Self {
        let (version, state, is_invoiced) = (Version::default(), State::Placed, false);
        Self { id, version, cents, state, is_invoiced }
    }
}

/// How far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Placed,
    Paid,
    Packed,
    Shipped,
    Delivered,
}

impl State {
    pub(crate) const ALL: [(Self, &str); 5] = [
        (Self::Placed, "placed"),
        (Self::Paid, "paid"),
        (Self::Packed, "packed"),
        (Self::Shipped, "shipped"),
        (Self::Delivered, "delivered"),
    ];

    pub(crate) fn as_str(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

impl FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text);
        found.map(|(state, _)| state).ok_or_else(|| format!("no order is {text:?}"))
    }
}

impl Entity for Order {
    type Id = i64;

    fn id(&self) -> i64 {
        self.id
    }

    fn version(&self) -> Version {
        self.version
    }

    fn set_version(&mut self, version: Version) {
        self.version = version;
    }
}

/// No card has more than that.
const CARD_LIMIT: i64 = 100_000;

/// Takes the money. The bank does not always answer, and a card may not have enough: then the order is set
/// aside after a few tries.
pub(crate) struct Payment;

impl Stage<Order> for Payment {
    fn name(&self) -> &'static str {
        "payment"
    }

    fn should_process_now(&self, order: &Order) -> bool {
        order.state == State::Placed
    }

    async fn process(&self, mut order: Order) -> Result<Visit<Order>, BoxError> {
        if fastrand::u8(..5) == 0 {
            return Err("the bank did not answer".into());
        }
        // A stage may be repeated, so a real bank would be given the order's id: who has paid, pays once.
        if order.cents > CARD_LIMIT {
            return Err("the card was declined".into());
        }
        order.state = State::Paid;
        Ok(Visit::updated(order))
    }

    fn limits(&self) -> Limits {
        Limits {
            backoff: Backoff { most: Duration::from_secs(1), ..Backoff::default() },
            tries: NonZeroU32::new(10).expect("not zero"),
            ..Limits::default()
        }
    }
}

/// Writes the invoice, while the order is being packed: two stages want a paid order. Each saves it, so the
/// later one has a conflict, and does its part again on what the other one saved.
pub(crate) struct Invoicing;

impl Stage<Order> for Invoicing {
    fn name(&self) -> &'static str {
        "invoicing"
    }

    fn should_process_now(&self, order: &Order) -> bool {
        order.state == State::Paid && !order.is_invoiced
    }

    async fn process(&self, mut order: Order) -> Result<Visit<Order>, BoxError> {
        // By now it may be packed, or invoiced.
        if order.is_invoiced {
            return Ok(Visit::untouched());
        }
        order.is_invoiced = true;
        Ok(Visit::updated(order))
    }
}

/// Packs; there are four tables to pack at.
pub(crate) struct Packing;

impl Stage<Order> for Packing {
    fn name(&self) -> &'static str {
        "packing"
    }

    fn should_process_now(&self, order: &Order) -> bool {
        order.state == State::Paid
    }

    async fn process(&self, mut order: Order) -> Result<Visit<Order>, BoxError> {
        // By now it may be packed.
        if order.state != State::Paid {
            return Ok(Visit::untouched());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        order.state = State::Packed;
        Ok(Visit::updated(order))
    }

    fn limits(&self) -> Limits {
        Limits { parallel: NonZeroU32::new(4).expect("not zero"), ..Limits::default() }
    }
}

/// Ships what has its invoice, and looks again later whether it has arrived.
pub(crate) struct Shipping {
    pub(crate) travels: Duration,
}

impl Stage<Order> for Shipping {
    fn name(&self) -> &'static str {
        "shipping"
    }

    fn should_process_now(&self, order: &Order) -> bool {
        order.state == State::Packed && order.is_invoiced
    }

    async fn process(&self, mut order: Order) -> Result<Visit<Order>, BoxError> {
        match order.state {
            State::Packed => {
                order.state = State::Shipped;
                Ok(Visit::updated(order).again(self.travels))
            }
            // A visit may be earlier than it was asked for: here that is a quick parcel, and elsewhere a reason
            // to ask the carrier first.
            State::Shipped => {
                order.state = State::Delivered;
                Ok(Visit::updated(order))
            }
            State::Placed | State::Paid | State::Delivered => Ok(Visit::untouched()),
        }
    }
}
