//! Decodes patches in a second thread, so that the worker's thread answers pings meanwhile (D5).

use crate::patching::Patching;
use crate::run::{Outcome, Shared};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Decodes patches one after another, in a thread that starts with the first patch.
pub struct Decoder {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    running: Option<(Sender<Patching>, JoinHandle<()>)>, // few jobs wait, since each has a buffer
}

impl Decoder {
    pub fn new(shared: Arc<Shared>) -> Decoder {
        Decoder { shared, stop: Arc::default(), running: None }
    }

    /// Queues a patch to be decoded. The result is reported as `Outcome::Decoded`.
    pub fn decode(&mut self, job: Patching) {
        if self.running.is_none() {
            self.start();
        }
        let unsent = match &self.running {
            Some((jobs, _)) => jobs.send(job).map_err(|unsent| unsent.0),
            None => Err(job),
        };
        if let Err(job) = unsent {
            report(&self.shared, job, Err("there is no thread to decode it".to_owned()));
        }
    }

    fn start(&mut self) {
        let (sender, jobs) = channel();
        let (shared, stop) = (self.shared.clone(), self.stop.clone());
        let thread = thread::Builder::new().name("weightbus-patch".to_owned());
        let thread = thread.spawn(move || run(&shared, &jobs, &stop));
        self.running = thread.ok().map(|thread| (sender, thread));
    }
}

fn run(shared: &Shared, jobs: &Receiver<Patching>, stop: &AtomicBool) {
    for mut job in jobs {
        let stopped = || stop.load(Ordering::Relaxed);
        let done = catch_unwind(AssertUnwindSafe(|| job.run(&stopped)));
        report(shared, job, done.unwrap_or_else(|_| Err("it cannot be decoded, which is a bug".to_owned())));
    }
}

fn report(shared: &Shared, job: Patching, done: Result<Duration, String>) {
    let (model, key) = (job.model.clone(), job.key);
    shared.report(&model, key, Outcome::Decoded(Box::new(job), done));
}

impl Drop for Decoder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some((jobs, thread)) = self.running.take() {
            drop(jobs);
            let _ = thread.join(); // the thread stops soon; then nothing reads the user's memory
        }
    }
}
