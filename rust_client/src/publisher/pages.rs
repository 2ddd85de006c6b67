//! Pages of the roster for observers: headers with as many rows as fit.

use super::effects::WorkerEvent;
use super::observers::{ModelSeen, ERROR_MAX};
use super::roster::Peer;
use super::status::{count_of, is_stuck};
use super::store::Store;
use crate::limits::{Timing, HEADER_BYTES_MAX, LABEL_MAX};
use crate::observed::{Happened, ModelRow, Published, Standing, WorkerRow};
use crate::transfer::Time;
use crate::words::printable;
use serde::Serialize;
use std::time::Duration;

pub const PAGE_BYTES: usize = HEADER_BYTES_MAX - 1024; // for rows; the other fields take the rest
const SHORT: usize = 64; // characters of each error of a worker whose row is too long for a page
const VERSIONS_TOLD: usize = 24; // versions of a model whose ages are sent

/// A change to send to observers.
pub enum Changed<'a> {
    Model(&'a str, &'a ModelSeen),
    Worker(&'a Peer),
    Event(Time, &'a WorkerEvent),
}

/// A page that is being filled with rows, which are JSON texts.
pub struct Page {
    /// The revision of the last change in the page.
    pub revision: u64,
    since: u64,
    models: String,
    rows: String,
    events: String,
    room: usize,
    count: usize,
}

impl Page {
    /// The most rows in one page: more do not fit a header.
    pub const ROWS_MAX: usize = 1024;

    pub fn new(since: u64) -> Page {
        let (models, rows, events) = (String::new(), String::new(), String::new());
        Page { revision: since, since, models, rows, events, room: PAGE_BYTES, count: 0 }
    }

    /// Adds a change with the revision `at`. Returns false if the page has no room for the change;
    /// an empty page has room for any.
    pub fn takes(&mut self, at: u64, what: &Changed, store: &Store, timing: &Timing, now: Time) -> bool {
        let row = match what {
            Changed::Model(name, model) => json(&model_row(name, model, now)),
            Changed::Event(time, event) => json(&Happened {
                kind: event.kind.as_str(),
                worker: &event.worker,
                text: &printable(&event.text, ERROR_MAX),
                age_ms: millis(now, *time),
            }),
            Changed::Worker(peer) => {
                let row = worker_row(peer, ERROR_MAX, store, timing, now);
                if row.len() < PAGE_BYTES {
                    row
                } else {
                    worker_row(peer, SHORT, store, timing, now)
                }
            }
        };
        let nbytes = row.len() + 1;
        if self.count > 0 && (nbytes > self.room || self.count >= Page::ROWS_MAX) {
            return false;
        }
        let list = match what {
            Changed::Model(..) => &mut self.models,
            Changed::Worker(_) => &mut self.rows,
            Changed::Event(..) => &mut self.events,
        };
        if !list.is_empty() {
            list.push(',');
        }
        list.push_str(&row);
        (self.room, self.count, self.revision) = (self.room.saturating_sub(nbytes), self.count + 1, at);
        true
    }

    /// Returns the page as the header of a `roster` message, with the epoch, the latest revision,
    /// the number of workers, and the time in milliseconds since 1970. `follows` is true if
    /// another page of the same answer follows, and `more` if the observer can request more.
    pub fn header(
        self,
        (epoch, latest, workers, time_ms): (u64, u64, usize, u64),
        follows: bool,
        more: bool,
    ) -> Vec<u8> {
        let Page { since, revision, models, rows, events, .. } = self;
        format!(
            r#"{{"wbp":1,"type":"roster","epoch":{},"since":{},"revision":{},"latest":{},"workers":{},"more":{},"follows":{},"time_ms":{},"models":[{}],"rows":[{}],"events":[{}]}}"#,
            epoch,
            since,
            revision,
            latest,
            workers,
            more,
            follows,
            time_ms,
            models,
            rows,
            events
        )
        .into_bytes()
    }
}

fn json(row: &impl Serialize) -> String {
    match serde_json::to_string(row) {
        Ok(row) => row,
        Err(error) => unreachable!("rows are plain data: {}", error),
    }
}

/// Returns the row of a model, with the ages of its latest version and of some earlier ones.
fn model_row<'a>(name: &'a str, model: &'a ModelSeen, now: Time) -> ModelRow<'a> {
    let version = model.latest.1;
    let (mut published, mut step) = (Vec::new(), 0u64);
    for back in 0..VERSIONS_TOLD {
        let number = version.saturating_sub(step); // there is no version 0
        published.extend(
            model.times.get(&number).map(|at| Published { version: number, age_ms: millis(now, *at) }),
        );
        step += 1 << (back / 2).saturating_sub(1); // 1 1 1 1 2 2 4 4 8 8 ...
    }
    ModelRow { name, version, nbytes: model.nbytes, encoding: "raw", published, metadata: &model.metadata }
}

/// Returns the row of a worker, with at most `error_max` characters of each error.
fn worker_row(peer: &Peer, error_max: usize, store: &Store, timing: &Timing, now: Time) -> String {
    let standing = |model| (model, standing_of(peer, model, error_max, store, now));
    json(&WorkerRow {
        name: &peer.hello.name,
        state: match (peer.lost(), is_stuck(peer, timing, now)) {
            (true, _) => "lost",
            (false, true) => "stuck",
            (false, false) => "live",
        },
        road: if peer.subscribed { "pushed" } else { "pulled" },
        heard_ms: millis(now, peer.heard_at),
        models: peer.hello.models.keys().map(String::as_str).map(standing).collect(),
        client: &printable(&peer.hello.client, LABEL_MAX),
        host: &printable(&peer.hello.host, LABEL_MAX),
        pid: peer.hello.pid,
    })
}

fn standing_of<'a>(peer: &'a Peer, model: &str, error_max: usize, store: &Store, now: Time) -> Standing<'a> {
    let (epoch, version) = peer.runs(model);
    let took = peer.seen.took.get(model).filter(|(number, _)| *number == version);
    let mut standing = Standing {
        epoch,
        version,
        newest: store.models.get(model).and_then(|its| its.latest_for(&peer.hello.name)).unwrap_or(0),
        took_us: took.map_or(0, |(_, micros)| *micros),
        ..Standing::default()
    };
    if let Some((failed, error)) = peer.seen.failed.get(model) {
        let end = error.char_indices().nth(error_max).map_or(error.len(), |(end, _)| end);
        (standing.failed, standing.error) = (*failed, &error[..end]);
    }
    if let Some(incoming) = peer.incoming.get(model) {
        (standing.incoming, standing.phase) = (incoming.version, Some(incoming.phase));
        (standing.chunks, standing.count) = (incoming.chunks, count_of(model, incoming, store));
        standing.idle_ms = millis(now, incoming.since);
    }
    standing
}

/// Returns the milliseconds from `at` to `now`.
fn millis(now: Time, at: Time) -> u64 {
    let ago: Duration = now.saturating_sub(at);
    (ago.as_secs_f64() * 1000.0).round() as u64
}
