//! Builds the pages that answer an observer: messages whose JSON header has as many rows as fit.

use super::effects::WorkerEvent;
use super::observers::ObservedModel;
use super::roster::Peer;
use super::status::{chunk_count, state_of};
use super::store::Store;
use crate::limits::{Timing, ERROR_MAX, HEADER_BYTES_MAX, LABEL_MAX, PAGE_ROWS_MAX, VERSIONS_LISTED};
use crate::messages::{
    encode, Doing, Happened, ModelRow, Published, RosterPage, ToObserver, WorkerRow, WorkerRowRoad,
};
use crate::transfer::Time;
use crate::words::printable;
use serde::Serialize;
use std::time::Duration;

pub const PAGE_BYTES: usize = HEADER_BYTES_MAX - 1024; // of rows; the other fields need less than 1024
const SHORT_ERROR: usize = 64; // characters kept of each error, if a worker's row would be too long

/// A change that becomes a row of a page.
pub enum Changed<'a> {
    Model(&'a str, &'a ObservedModel),
    Worker(&'a Peer),
    Event(Time, &'a WorkerEvent),
}

/// A page that is being filled with rows.
pub struct Page {
    /// The revision of the last change on the page.
    pub revision: u64,
    since: u64,
    models: Vec<ModelRow>,
    rows: Vec<WorkerRow>,
    events: Vec<Happened>,
    bytes_left: usize,
    row_count: usize,
}

impl Page {
    pub fn new(since: u64) -> Page {
        let (models, rows, events) = (Vec::new(), Vec::new(), Vec::new());
        Page { revision: since, since, models, rows, events, bytes_left: PAGE_BYTES, row_count: 0 }
    }

    /// Adds a change with the revision `at`. Returns false if the page has no room. An empty page has
    /// room for any change.
    pub fn try_add(&mut self, at: u64, what: &Changed, store: &Store, timing: &Timing, now: Time) -> bool {
        match what {
            Changed::Model(name, model) => {
                let row = model_row(name, model, now);
                self.reserve(at, &row).then(|| self.models.push(row)).is_some()
            }
            Changed::Event(time, event) => {
                let row = Happened {
                    kind: event.kind.as_str().to_owned(),
                    worker: event.worker.clone(),
                    text: printable(&event.text, ERROR_MAX),
                    age_ms: millis(now, *time),
                    ..Default::default()
                };
                self.reserve(at, &row).then(|| self.events.push(row)).is_some()
            }
            Changed::Worker(peer) => {
                let row = worker_row(peer, ERROR_MAX, store, timing, now);
                let short = nbytes(&row) > PAGE_BYTES;
                let row = if short { worker_row(peer, SHORT_ERROR, store, timing, now) } else { row };
                self.reserve(at, &row).then(|| self.rows.push(row)).is_some()
            }
        }
    }

    /// Reserves room for a row with the revision `at`. Returns false if the row does not fit.
    fn reserve(&mut self, at: u64, row: &impl Serialize) -> bool {
        let nbytes = nbytes(row);
        if self.row_count > 0 && (nbytes > self.bytes_left || self.row_count >= PAGE_ROWS_MAX) {
            return false;
        }
        (self.bytes_left, self.row_count, self.revision) =
            (self.bytes_left.saturating_sub(nbytes), self.row_count + 1, at);
        true
    }

    /// Returns the page as the header of a `roster` message. The tuple has the epoch, the latest revision,
    /// the number of workers, and the milliseconds since 1970. `follows` is true if another page of the
    /// same answer follows, `more` if there are changes for which the observer must send a new request.
    pub fn header(
        self,
        (epoch, latest, workers, time_ms): (u64, u64, usize, u64),
        follows: bool,
        more: bool,
    ) -> Vec<u8> {
        let Page { since, revision, models, rows, events, .. } = self;
        encode(&ToObserver::Roster(RosterPage {
            epoch,
            since,
            revision,
            latest,
            workers: workers as u64,
            more,
            follows,
            time_ms,
            models,
            rows,
            events,
            ..Default::default()
        }))
    }
}

/// Returns the number of bytes that a row takes in a page.
fn nbytes(row: &impl Serialize) -> usize {
    serde_json::to_vec(row).map_or(PAGE_BYTES, |row| row.len()) + 1
}

/// Returns the row of a model, with the ages of its latest version and of some older versions.
fn model_row(name: &str, model: &ObservedModel, now: Time) -> ModelRow {
    let version = model.latest.1;
    let (mut published, mut step) = (Vec::new(), 0u64);
    for back in 0..VERSIONS_LISTED {
        let number = version.saturating_sub(step); // there is no version 0
        published.extend(model.times.get(&number).map(|at| {
            let age_ms = millis(now, *at);
            Published { version: number, age_ms, ..Default::default() }
        }));
        step += 1 << (back / 2).saturating_sub(1); // 1 1 1 1 2 2 4 4 8 8 ...
    }
    let (name, nbytes, encoding) = (name.to_owned(), model.nbytes, "raw".to_owned());
    let metadata = model.metadata.clone();
    ModelRow { name, version, nbytes, encoding, published, metadata, ..Default::default() }
}

/// Returns the row of a worker, with at most `error_max` characters of each error.
fn worker_row(peer: &Peer, error_max: usize, store: &Store, timing: &Timing, now: Time) -> WorkerRow {
    let doing = |model: &String| (model.clone(), doing_of(peer, model, error_max, store, now));
    WorkerRow {
        name: peer.hello.name.clone(),
        state: state_of(peer, timing, now),
        road: match (peer.shared_memory, peer.subscribed) {
            (true, _) => WorkerRowRoad::Shared,
            (false, true) => WorkerRowRoad::Pushed,
            (false, false) => WorkerRowRoad::Pulled,
        },
        heard_ms: millis(now, peer.heard_at),
        models: peer.hello.models.keys().map(doing).collect(),
        client: printable(&peer.hello.client, LABEL_MAX),
        host: printable(&peer.hello.host, LABEL_MAX),
        pid: peer.hello.pid,
        relay: peer.is_relay(),
        through: peer.through.clone(),
        ..Default::default()
    }
}

/// Returns what a worker does with a model.
fn doing_of(peer: &Peer, model: &str, error_max: usize, store: &Store, now: Time) -> Doing {
    let (epoch, version) = peer.running_key(model);
    let took = peer.observed.took.get(model).filter(|(number, _)| *number == version);
    let mut doing = Doing {
        epoch,
        version,
        newest: store.models.get(model).and_then(|its| its.latest_for(&peer.hello.name)).unwrap_or(0),
        took_us: took.map_or(0, |(_, micros)| *micros),
        ..Default::default()
    };
    if let Some((failed, error)) = peer.observed.failed.get(model) {
        (doing.failed, doing.error) = (*failed, error.chars().take(error_max).collect());
    }
    if let Some(incoming) = peer.incoming.get(model) {
        (doing.incoming, doing.phase) = (incoming.version, Some(incoming.phase));
        (doing.chunks, doing.count) = (incoming.chunks, chunk_count(model, incoming, store));
        doing.idle_ms = millis(now, incoming.since);
    }
    doing
}

/// Returns the milliseconds from `at` to `now`.
fn millis(now: Time, at: Time) -> u64 {
    let ago: Duration = now.saturating_sub(at);
    (ago.as_secs_f64() * 1000.0).round() as u64
}
