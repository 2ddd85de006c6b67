//! Pages of the roster for observers: headers with as many rows as fit.

use super::effects::WorkerEvent;
use super::observers::ModelSeen;
use super::roster::Peer;
use super::status::{count_of, is_stuck};
use super::store::Store;
use crate::limits::{Timing, ERROR_MAX, HEADER_BYTES_MAX, LABEL_MAX, PAGE_ROWS_MAX, VERSIONS_TOLD};
use crate::messages::{
    Doing, Happened, ModelRow, Published, RosterPage, WorkerRow, WorkerRowRoad, WorkerRowState,
};
use crate::transfer::Time;
use crate::words::printable;
use serde::Serialize;
use std::time::Duration;

pub const PAGE_BYTES: usize = HEADER_BYTES_MAX - 1024; // for rows; the other fields take the rest
const SHORT: usize = 64; // characters of each error of a worker whose row is too long for a page

/// A change to send to observers.
pub enum Changed<'a> {
    Model(&'a str, &'a ModelSeen),
    Worker(&'a Peer),
    Event(Time, &'a WorkerEvent),
}

/// A page that is being filled with rows.
pub struct Page {
    /// The page; `revision` is that of the last change in the page.
    pub roster: RosterPage,
    room: usize,
    count: usize,
}

impl Page {
    pub fn new(since: u64) -> Page {
        let roster = RosterPage { since, revision: since, ..Default::default() };
        Page { roster, room: PAGE_BYTES, count: 0 }
    }

    /// Adds a change with the revision `at`. Returns false if the page has no room for the change;
    /// an empty page has room for any.
    pub fn takes(&mut self, at: u64, what: &Changed, store: &Store, timing: &Timing, now: Time) -> bool {
        match what {
            Changed::Model(name, model) => {
                let row = model_row(name, model, now);
                self.has_room(&row) && self.add(at, |page| page.models.push(row))
            }
            Changed::Event(time, event) => {
                let event = Happened {
                    kind: event.kind.as_str().to_owned(),
                    worker: event.worker.clone(),
                    text: printable(&event.text, ERROR_MAX),
                    age_ms: millis(now, *time),
                    ..Default::default()
                };
                self.has_room(&event) && self.add(at, |page| page.events.push(event))
            }
            Changed::Worker(peer) => {
                let mut row = worker_row(peer, ERROR_MAX, store, timing, now);
                if nbytes(&row) > PAGE_BYTES {
                    row = worker_row(peer, SHORT, store, timing, now);
                }
                self.has_room(&row) && self.add(at, |page| page.rows.push(row))
            }
        }
    }

    /// True if a row fits; it then takes its bytes of the page.
    fn has_room(&mut self, row: &impl Serialize) -> bool {
        let nbytes = nbytes(row);
        let fits = self.count == 0 || (nbytes <= self.room && self.count < PAGE_ROWS_MAX);
        if fits {
            self.room = self.room.saturating_sub(nbytes);
        }
        fits
    }

    fn add(&mut self, at: u64, push: impl FnOnce(&mut RosterPage)) -> bool {
        push(&mut self.roster);
        (self.count, self.roster.revision) = (self.count + 1, at);
        true
    }
}

/// Returns the bytes of a row in a page.
fn nbytes(row: &impl Serialize) -> usize {
    serde_json::to_vec(row).map_or(PAGE_BYTES, |row| row.len()) + 1
}

/// Returns the row of a model, with the ages of its latest version and of some earlier ones.
fn model_row(name: &str, model: &ModelSeen, now: Time) -> ModelRow {
    let version = model.latest.1;
    let (mut published, mut step) = (Vec::new(), 0u64);
    for back in 0..VERSIONS_TOLD {
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
    let doing = |model: &String| (model.clone(), doing(peer, model, error_max, store, now));
    WorkerRow {
        name: peer.hello.name.clone(),
        state: match (peer.lost(), is_stuck(peer, timing, now)) {
            (true, _) => WorkerRowState::Lost,
            (false, true) => WorkerRowState::Stuck,
            (false, false) => WorkerRowState::Live,
        },
        road: if peer.subscribed { WorkerRowRoad::Pushed } else { WorkerRowRoad::Pulled },
        heard_ms: millis(now, peer.heard_at),
        models: peer.hello.models.keys().map(doing).collect(),
        client: printable(&peer.hello.client, LABEL_MAX),
        host: printable(&peer.hello.host, LABEL_MAX),
        pid: peer.hello.pid,
        ..Default::default()
    }
}

fn doing(peer: &Peer, model: &str, error_max: usize, store: &Store, now: Time) -> Doing {
    let (epoch, version) = peer.runs(model);
    let took = peer.seen.took.get(model).filter(|(number, _)| *number == version);
    let mut doing = Doing {
        epoch,
        version,
        newest: store.models.get(model).and_then(|its| its.latest_for(&peer.hello.name)).unwrap_or(0),
        took_us: took.map_or(0, |(_, micros)| *micros),
        ..Default::default()
    };
    if let Some((failed, error)) = peer.seen.failed.get(model) {
        (doing.failed, doing.error) = (*failed, error.chars().take(error_max).collect());
    }
    if let Some(incoming) = peer.incoming.get(model) {
        (doing.incoming, doing.phase) = (incoming.version, Some(incoming.phase));
        (doing.chunks, doing.count) = (incoming.chunks, count_of(model, incoming, store));
        doing.idle_ms = millis(now, incoming.since);
    }
    doing
}

/// Returns the milliseconds from `at` to `now`.
fn millis(now: Time, at: Time) -> u64 {
    let ago: Duration = now.saturating_sub(at);
    (ago.as_secs_f64() * 1000.0).round() as u64
}
