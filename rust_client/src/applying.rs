//! The user's part of applying: functions that decide whether a version runs, within a time (W24).

use crate::gate::Call;
use crate::layout::Layout;
use crate::model::Weights;
use crate::snapshot::Snapshot;
use crate::transfer::Key;
use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const APPLY_TIMEOUT: Duration = Duration::from_secs(60);
pub const APPLY_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600); // the publisher stops waiting long before

/// A version, whole and verified, on which the user's function decides.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Offer<'a> {
    /// Of which model.
    pub model: &'a str,
    /// The epoch of its publisher.
    pub epoch: u64,
    /// Its number.
    pub version: u64,
    /// The names, dtypes and shapes of its tensors.
    pub layout: &'a Layout,
    /// Memory of the user's, which holds it; nothing before a byte has changed.
    pub weights: Option<&'a Weights>,
    /// It itself, of a model without memory of the user's; nothing before it was made.
    pub snapshot: Option<&'a Arc<Snapshot>>,
}

impl fmt::Debug for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Offer(version {} of {}, epoch {})", self.version, self.model, self.epoch)
    }
}

/// A function of the user's; what it says against a version goes to the publisher.
pub type Decide = Box<dyn Fn(&Offer) -> Result<(), Box<dyn Error>> + Send + Sync>;

/// All of them, and the time that each call has.
pub struct Functions {
    /// Before a byte changes.
    pub before: Option<Decide>,
    /// Before the version is reported.
    pub apply: Option<Decide>,
    pub timeout: Duration,
}

/// A call that is under way.
pub struct Calling {
    pub model: String,
    pub key: Key,
    /// Whether what ran before still runs if it comes to nothing.
    pub intact: bool,
    /// What is said of it if it does not return in time.
    pub too_long: String,
    pub call: Arc<Call>,
}

impl Functions {
    /// A call begins.
    pub fn begin(&self, offer: &Offer, intact: bool) -> (Arc<Call>, Calling) {
        let call = Arc::new(Call::new(Instant::now() + self.timeout));
        let (model, key) = (offer.model.to_owned(), (offer.epoch, offer.version));
        (call.clone(), Calling { model, key, intact, too_long: self.too_long(), call })
    }

    /// What is said of a call that has not returned in time.
    pub fn too_long(&self) -> String {
        format!("the user's function did not return within {:?}", self.timeout)
    }
}

/// Calls a function; its words if it turns the version down.
pub fn ask(decide: &Decide, offer: &Offer) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(|| decide(offer).map_err(|error| error.to_string()))) {
        Ok(decided) => decided,
        Err(panic) => Err(format!("the user's function panicked: {}", words_of(&*panic))),
    }
}

fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words")
}
