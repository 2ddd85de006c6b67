//! Finds out whether a ZeroMQ socket answers at an endpoint, without blocking the worker's thread.

use crate::endpoint::Endpoint;
use crate::framing::greeting;
use crate::subscription::dial;
use crate::waker::Waker;
use std::io::{self, Read, Write};
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(1); // for each address of a host, and for the answer
const SIGNATURE_BYTES: usize = 10; // of a greeting: then the peer knows that this is ZMTP

/// A probe, if one is in flight.
#[derive(Default)]
pub struct Probe(Option<Receiver<bool>>);

impl Probe {
    /// Unless a probe is in flight, starts a thread that probes, and then wakes the worker's thread.
    pub fn start(&mut self, endpoint: &Endpoint, waker: Arc<Waker>) {
        if self.0.is_some() {
            return;
        }
        let (found, answer) = channel();
        let endpoint = endpoint.clone();
        let probe = move || {
            let _ = found.send(answers(&endpoint).unwrap_or(false)); // the receiver may be gone
            drop(found);
            waker.wake();
        };
        self.0 = Some(answer);
        // if no thread can be started, the result is false
        let _ = thread::Builder::new().name("weightbus-probe".to_owned()).spawn(probe);
    }

    /// Returns the result of a probe that has ended, once: true if a publisher answers.
    pub fn take_result(&mut self) -> Option<bool> {
        let result = match self.0.as_ref()?.try_recv() {
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => false, // no thread could be started
            Ok(found) => found,
        };
        self.0 = None;
        Some(result)
    }
}

/// True if the peer's first byte is the first byte of a greeting.
fn answers(endpoint: &Endpoint) -> io::Result<bool> {
    let mut connection = dial(endpoint, PATIENCE)?;
    connection.set_nonblocking(false)?;
    connection.set_write_timeout(Some(PATIENCE))?;
    connection.set_read_timeout(Some(PATIENCE))?;
    let mine = &greeting(false, false)[..SIGNATURE_BYTES];
    connection.write_all(mine)?;
    let mut first = [0];
    connection.read_exact(&mut first)?;
    Ok(first[0] == mine[0])
}
