//! A worker's machine, to which every layout can be applied.

use super::MODEL;
use std::sync::Arc;
use weightbus::effects::Host;
use weightbus::layout::Layout;
use weightbus::limits::{Timing, BYTES_MAX};
use weightbus::machine::{Wanted, WorkerMachine};
use weightbus::messages::Hello;

pub struct AnyLayout;

impl Host for AnyLayout {
    fn fault(&self, _model: &str, _layout: &Layout) -> Option<String> {
        None
    }
}

/// `instance` is 32 hexadecimal digits.
pub fn worker(name: &str, instance: String, host: Arc<dyn Host>) -> WorkerMachine {
    let identity = Hello { name: name.to_owned(), instance, ..Hello::default() };
    let wanted = [Wanted { model: MODEL.to_owned(), nbytes: 0 }];
    WorkerMachine::new(identity, &wanted, host, BYTES_MAX, Timing::default())
}
