//! Calls the user's functions that decide whether a version runs, with a time limit (W24).

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
// a day is far longer than a publisher waits for an acknowledgement
pub const APPLY_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A version, whole and verified, on which the user's function decides.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Offer<'a> {
    /// Id of the model.
    pub model: &'a str,
    /// Epoch of the publisher.
    pub epoch: u64,
    /// Version number.
    pub version: u64,
    /// Names, dtypes and shapes of the tensors.
    pub layout: &'a Layout,
    /// The model's weights, which hold the version already; `None` in `before_apply`.
    pub weights: Option<&'a Weights>,
    /// The version's snapshot, for a model registered with `Builder::snapshots`; `None` in
    /// `before_apply`.
    pub snapshot: Option<&'a Arc<Snapshot>>,
}

impl fmt::Debug for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Offer(version {} of {}, epoch {})", self.version, self.model, self.epoch)
    }
}

/// A user's function that decides on a version. The text of its error is sent to the publisher.
pub type Decide = Box<dyn Fn(&Offer) -> Result<(), Box<dyn Error>> + Send + Sync>;

/// The user's functions, and the time limit of each call.
pub struct Functions {
    /// Called before any byte of the model changes.
    pub before: Option<Decide>,
    /// Called before the version is acknowledged.
    pub apply: Option<Decide>,
    pub timeout: Duration,
}

/// A running call of a user's function, and the failure to report if the call becomes overdue.
pub struct Calling {
    pub model: String,
    pub key: Key,
    /// True if the previous version still runs after a rejection.
    pub intact: bool,
    /// Error text if the call becomes overdue.
    pub overdue_text: String,
    pub call: Arc<Call>,
}

impl Functions {
    /// Starts the time limit of a call. Returns the call, and its record for `Shared::watch`.
    pub fn begin(&self, offer: &Offer, intact: bool) -> (Arc<Call>, Calling) {
        let call = Arc::new(Call::new(Instant::now() + self.timeout));
        let (model, key) = (offer.model.to_owned(), (offer.epoch, offer.version));
        (call.clone(), Calling { model, key, intact, overdue_text: self.overdue_text(), call })
    }

    /// Returns the error text of an overdue call.
    pub fn overdue_text(&self) -> String {
        format!("the user's function did not return within {:?}", self.timeout)
    }
}

/// Calls the user's function. Returns the text of its error or panic, which rejects the version.
pub fn ask(decide: &Decide, offer: &Offer) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(|| decide(offer).map_err(|error| error.to_string()))) {
        Ok(decided) => decided,
        Err(panic) => Err(format!("the user's function panicked: {}", panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a text")
}
