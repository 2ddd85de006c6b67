//! The worker's thread, which owns the sockets, moves frames, and calls the state machine.
//!
//! Ready versions go to the `ReadyQueue`. The user's threads report their results as `Outcome`.

use crate::applying::Calling;
use crate::casting::{overflow_text, Overflow};
use crate::control::Control;
use crate::decoder::Decoder;
use crate::effects::{Effect, Host};
use crate::error::Error;
use crate::gate::CallState;
use crate::machine::{State, Ticket, WorkerMachine};
use crate::messages::encode;
use crate::names::Names;
use crate::patching::{Base, Patching};
use crate::probe::Probe;
use crate::protocol::codes::Code;
use crate::raw::fork::Process;
use crate::ready_queue::{Group, ReadyQueue};
use crate::sources::{SourceChunk, SourceFetch, Sources};
use crate::subscription::Subscription;
use crate::transfer::{Key, Time};
use crate::waker::Waker;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::os::unix::io::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(100); // between two ticks, if nothing happens
const BATCH: usize = 16; // messages read from one socket before the other is read

/// A report on a version from another thread: a user's, the decoder's or a source's.
#[derive(Debug)]
pub enum Outcome {
    Taken,
    PutBack,
    Applied {
        digest: String,
        base: Option<Base>,
        /// Tensors that could not hold all values.
        lost: Vec<Overflow>,
    },
    Failed {
        text: String,
        intact: bool,
        /// True if the version will be received again: it failed only because a companion is torn.
        again: bool,
    },
    Stale,
    Dropped,
    /// The user's function has returned after its deadline. The failure was reported at the
    /// deadline.
    Late,
    /// How long a patch took to decode, or the reason that the patch cannot be used.
    Decoded(Box<Patching>, Result<Duration, String>),
    /// A chunk of the version, from a source.
    FromSource(SourceChunk),
    /// The end of a source's job; an error says why the source has not sent all chunks.
    SourceOver(Box<SourceFetch>, Result<(), String>),
}

/// An event of a worker, for logs and screens.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The publisher has admitted this worker.
    Joined { epoch: u64 },
    /// The publisher is lost. The worker sends `hello` until the publisher answers, or changes over
    /// to the next of its addresses.
    Lost,
    /// The worker, which has several addresses, now uses another one of them.
    ChangedOver { from: String, to: String },
    /// The publisher refuses this worker.
    Refused { code: Code, text: String },
    /// A version was rejected. The previous version still runs, unless the text says that none
    /// runs.
    Rejected { model: String, epoch: u64, version: u64, code: Code, text: String },
    /// Something unusual happened that is not a failure.
    Notice { code: Code, text: String },
}

/// Callback for events.
pub type Listener = Box<dyn FnMut(&Event) + Send>;

/// State that the worker's thread shares with the user's threads.
pub struct Shared {
    process: Process,
    pub ready_queue: ReadyQueue,
    waker: Arc<Waker>,
    stopping: AtomicBool,
    address_index: AtomicUsize, // index of the present address
    pub outcomes: Mutex<VecDeque<(String, Key, Outcome)>>, // in the order in which they happened
    calls: Mutex<Vec<Calling>>,
    state: Mutex<State>, // at the last tick
}

impl Shared {
    pub fn new() -> io::Result<Shared> {
        Ok(Shared {
            process: Process::this(),
            ready_queue: ReadyQueue::new()?,
            waker: Arc::new(Waker::new()?),
            stopping: AtomicBool::new(false),
            address_index: AtomicUsize::new(0),
            outcomes: Mutex::default(),
            calls: Mutex::default(),
            state: Mutex::default(),
        })
    }

    pub fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// True if this process has the worker's thread; a forked child has only a copy of its memory.
    pub fn is_here(&self) -> bool {
        self.process.is_this()
    }

    /// Reports the outcome of a version to the worker's thread.
    pub fn report(&self, model: &str, key: Key, outcome: Outcome) {
        // `Taken` and `PutBack` send nothing to the publisher, so they can wait for the next turn
        let urgent = !matches!(outcome, Outcome::Taken | Outcome::PutBack);
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes.push_back((model.to_owned(), key, outcome));
        drop(outcomes);
        if urgent {
            self.waker.wake();
        }
    }

    /// Adds a call of a user's function. The worker's thread reports the call if it exceeds its
    /// deadline.
    pub fn watch(&self, calling: Calling) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(calling);
    }

    /// Reports each call that has exceeded its deadline, once, after all outcomes reported before.
    ///
    /// A user's thread calls this after such a call and before it releases the model. So the
    /// overdue call is reported before the model's next version.
    pub fn report_overdue(&self) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.retain(|Calling { model, key, intact, overdue_text, call }| {
            let state = call.state();
            if state == CallState::Overdue {
                let outcome = Outcome::Failed { text: overdue_text.clone(), intact: *intact, again: false };
                self.report(model, *key, outcome); // under the lock: no later outcome overtakes it
            }
            state == CallState::UnderWay
        });
    }

    /// Returns the worker's state at the last tick; empty in a forked child.
    pub fn state(&self) -> State {
        if !self.is_here() {
            return State::default();
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the index of the address that the worker uses.
    pub fn address_index(&self) -> usize {
        self.address_index.load(Ordering::Acquire)
    }

    /// Makes the worker's thread send `bye` and end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The worker's thread, and all that it owns.
pub struct Loop {
    pub machine: WorkerMachine,
    pub control: Control,
    pub addresses: Vec<String>,
    pub worker: String,
    pub shared: Arc<Shared>,
    pub listener: Option<Listener>,
    host: Arc<dyn Host>,
    decoder: Decoder,
    sources: Sources,
    data: Subscription<Ticket>,
    probe: Probe,
    started: Instant,
    names: Vec<Names>,
    refusals: BTreeMap<usize, (Code, String)>, // of this round, by address
    last_rejection: Option<(String, Key, &'static str)>, // the last that was reported, once only
    overflowed: HashSet<(String, String)>,     // models and tensors whose overflow was reported
}

impl Loop {
    pub fn new(
        machine: WorkerMachine,
        control: Control,
        addresses: Vec<String>,
        worker: String,
        shared: Arc<Shared>,
        listener: Option<Listener>,
        host: Arc<dyn Host>,
    ) -> Loop {
        let data = Subscription::new(shared.waker.clone());
        let started = Instant::now();
        let decoder = Decoder::new(shared.clone());
        let sources = Sources::new(shared.clone());
        let names = addresses.iter().filter_map(|address| Names::of(address)).collect();
        let last_rejection = None;
        Loop {
            machine,
            control,
            addresses,
            worker,
            shared,
            listener,
            host,
            decoder,
            sources,
            data,
            probe: Probe::default(),
            started,
            names,
            refusals: BTreeMap::new(),
            last_rejection,
            overflowed: HashSet::new(),
        }
    }

    fn now(&self) -> Time {
        self.started.elapsed()
    }

    /// Runs until `Shared::stop` is called.
    pub fn run(mut self) {
        let _closed = CloseQueue(self.shared.clone()); // after a panic, too
        let mut next_tick = Time::ZERO;
        while !self.shared.stopping.load(Ordering::Acquire) {
            if let Err(error) = self.turn(&mut next_tick) {
                self.shared.ready_queue.close(&format!("its sockets failed: {}", error));
                return;
            }
        }
        self.handle_outcomes();
        let goodbye = self.machine.close();
        self.perform(goodbye);
        self.shared.ready_queue.close("close() was called");
    }

    /// Waits for events and handles them. Ticks if a tick is due.
    fn turn(&mut self, next_tick: &mut Time) -> io::Result<()> {
        let now = self.now();
        let may_hello = self.machine.wants_to_join(now);
        let found = self.poll(next_tick.saturating_sub(now), may_hello)?;
        self.shared.waker.drain();
        self.shared.report_overdue(); // W24, while the function still runs
        self.handle_outcomes();
        if found.control {
            self.receive_control();
        }
        self.handle_changes();
        if self.control.is_open() {
            let effects = self.machine.connected(self.now());
            self.perform(effects);
        }
        let due = self.now() >= *next_tick;
        if found.data || due {
            self.receive_published(); // before the tick, which must see a chunk that came in part
        }
        if due {
            let now = self.now();
            let mut effects = Vec::new();
            if self.data.needs_ticket() {
                effects.extend(self.machine.without_ticket(now));
            }
            effects.extend(self.machine.tick(now));
            self.perform(effects);
            let in_session = self.machine.in_session();
            let unknown: Vec<_> =
                self.names.iter_mut().filter_map(|name| name.poll(in_session, now)).collect();
            for text in unknown {
                self.notify(Event::Notice { code: Code::from("unknown-host"), text });
            }
            self.store_state();
            *next_tick = now + TICK;
        }
        Ok(())
    }

    /// Handles changes of the control connection, and the answer of a probe.
    fn handle_changes(&mut self) {
        let now = self.now();
        let changes = self.control.take_changes(now, self.machine.timing().lost_after);
        if changes.any {
            self.machine.changed(now);
        }
        let mut effects = match changes.refused {
            Some(why) => self.machine.shut_out(why, now),
            None if changes.ended => self.machine.disconnected(now),
            None => Vec::new(),
        };
        if let Some(answers) = self.probe.take_result() {
            effects.extend(self.machine.probed(answers, now));
        }
        self.perform(effects);
    }

    fn store_state(&self) {
        *self.shared.state.lock().unwrap_or_else(PoisonError::into_inner) = self.machine.state();
    }

    /// Waits for events. Returns which sockets have input. With `writable`, an open control
    /// connection ends the wait, since a hello is due.
    fn poll(&mut self, time: Duration, writable: bool) -> io::Result<Readable> {
        let now = self.now();
        let data = self.data.process_events(now, &mut self.machine);
        let control = self.control.process_events(now);
        let events = |unsent| if unsent { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN };
        let watched = |(descriptor, unsent)| zmq::PollItem::from_fd(descriptor, events(unsent));
        let mut items = vec![zmq::PollItem::from_fd(self.shared.waker.as_raw_fd(), zmq::POLLIN)];
        items.extend(control.map(watched));
        items.extend(data.map(watched));
        let (control_arrived, data_arrived) = (self.control.has_arrived(), self.data.has_arrived());
        let changed = self.control.has_changed();
        let open = writable && self.control.is_open(); // a due hello is sent without waiting
        let at_once = control_arrived || data_arrived || open || changed;
        let milliseconds = if at_once { 0 } else { (time.as_micros() + 999) / 1000 };
        match zmq::poll(&mut items, milliseconds as i64) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error.to_raw())),
        }
        let mut readable = items[1..].iter().map(|item| item.is_readable() || item.is_error());
        let mut next = |watched: bool| watched && readable.next().unwrap_or(false);
        let control = control_arrived | next(control.is_some());
        let data = data_arrived | next(data.is_some());
        Ok(Readable { control, data })
    }

    fn receive_control(&mut self) {
        for _ in 0..BATCH {
            let frames = match self.control.receive(self.started.elapsed()) {
                Some(frames) => frames,
                None => return,
            };
            let payloads: Vec<&[u8]> = frames.iter().skip(1).map(|frame| &frame[..]).collect();
            let header = frames.first().map_or(&[][..], |frame| &frame[..]);
            let effects = self.machine.receive(header, &payloads, self.started.elapsed());
            self.perform(effects);
        }
    }

    fn receive_published(&mut self) {
        for _ in 0..BATCH {
            let now = self.now();
            let published = match self.data.receive(now, &mut self.machine) {
                Some(published) => published,
                None => return,
            };
            let effects = self.machine.receive_published(&published, self.now());
            self.perform(effects);
        }
    }

    /// Handles the outcomes reported so far. Later outcomes wait for the next turn, so that sources
    /// that send all the time do not keep the publisher waiting.
    fn handle_outcomes(&mut self) {
        let outcomes =
            std::mem::take(&mut *self.shared.outcomes.lock().unwrap_or_else(PoisonError::into_inner));
        for (model, key, outcome) in outcomes {
            let now = self.now();
            let effects = match outcome {
                Outcome::Taken => {
                    self.machine.taken(&model, key);
                    Vec::new()
                }
                Outcome::PutBack => {
                    self.machine.put_back(&model, key);
                    Vec::new()
                }
                Outcome::Applied { digest, base, lost } => {
                    self.notify_overflow(&model, key, &lost);
                    self.machine.applied(&model, key, &digest, base, &overflow_text(&lost), now)
                }
                Outcome::Decoded(decoding, done) => self.machine.decoded(*decoding, done, now),
                Outcome::Failed { text, intact, again } => {
                    self.failed(model, key, text, intact, again);
                    Vec::new()
                }
                Outcome::Late => {
                    let text = format!(
                        "version {} of {}: the user's function returned after its deadline; its result is ignored",
                        key.1, model
                    );
                    self.notify(Event::Notice { code: Code::Apply, text });
                    Vec::new()
                }
                Outcome::FromSource(chunk) => self.machine.source_chunk(&model, key, &chunk, now),
                Outcome::SourceOver(job, done) => self.machine.source_over(&job, done, now),
                Outcome::Stale => self.machine.stale(&model, key, now),
                Outcome::Dropped => self.machine.dropped(&model, key, now),
            };
            self.perform(effects);
        }
    }

    /// Handles a version that was not applied.
    fn failed(&mut self, model: String, key: Key, text: String, intact: bool, again: bool) {
        let now = self.now();
        let effects = match again {
            true => self.machine.failed_for_now(&model, key, &text, now),
            false => self.machine.failed(&model, key, &text, intact, now),
        };
        let ((epoch, version), code) = (key, Code::Apply);
        self.notify(Event::Rejected { model, epoch, version, code, text });
        self.perform(effects);
    }

    /// Notifies the user of tensors that could not hold all values, once for each tensor.
    fn notify_overflow(&mut self, model: &str, (_, version): Key, lost: &[Overflow]) {
        let is_new = |its: &&Overflow| self.overflowed.insert((model.to_owned(), its.name.clone()));
        let new: Vec<Overflow> = lost.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            let text = format!(
                "version {} of {}: {}; BF16, unlike F16, has the range of F32",
                version,
                model,
                overflow_text(&new)
            );
            self.notify(Event::Notice { code: Code::from("overflow"), text });
        }
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => self.control.send(&encode(&message)),
                Effect::Subscribe { topic, on } => self.data.subscribe(&topic, on),
                Effect::Connect { endpoint, ticket } => self.connect(&endpoint, ticket),
                Effect::Redial => self.redial(),
                Effect::ChangeOver { to, pause } => self.change_over(to, pause),
                Effect::Probe => self.probe.start(self.control.first_endpoint(), self.shared.waker()),
                Effect::Ready(staged) => self.deliver(vec![staged]),
                Effect::ReadyAtOnce(group) => self.deliver(group),
                Effect::Decode(decoding) => self.decoder.decode(decoding),
                Effect::FetchFromSource(job) => {
                    let (hello, timing) =
                        (self.machine.hello_for(&job.subject.model), *self.machine.timing());
                    self.sources.fetch(job, &self.control, hello, timing);
                }
                Effect::Renamed { model, was, key, metadata } => {
                    self.host.renamed(&model, was, key, &metadata)
                }
                Effect::Joined { epoch } => {
                    self.refusals.clear();
                    self.store_state();
                    self.notify(Event::Joined { epoch }); // before `wait_joined` returns
                    self.shared.ready_queue.join(epoch);
                }
                Effect::Lost => self.notify(Event::Lost),
                Effect::Rejected { model, key, code, text } => self.rejected(model, key, code, text),
                Effect::Refused { code, text } => self.refused(Code::from(&code[..]), text),
                Effect::Notice { code, text } => {
                    self.notify(Event::Notice { code: Code::from(&code[..]), text })
                }
            }
        }
    }

    fn deliver(&mut self, group: Group) {
        for older in self.shared.ready_queue.put(group) {
            let (model, key) = (older.model.clone(), older.key);
            drop(older); // its buffer is free for the next version
            let effects = self.machine.dropped(&model, key, self.now());
            self.perform(effects);
        }
    }

    fn connect(&mut self, named: &str, ticket: String) {
        match self.control.data_endpoint(named) {
            Ok(endpoint) => self.data.connect(endpoint, ticket, &mut self.machine),
            Err(error) => {
                let text = format!("no pushed data, all is fetched: {}", error);
                self.notify(Event::Notice { code: Code::from("data-address"), text });
            }
        }
    }

    fn redial(&mut self) {
        self.control.redial();
        self.data.redial(&mut self.machine);
    }

    fn change_over(&mut self, to: usize, pause: Duration) {
        if !pause.is_zero() {
            self.refused_everywhere();
        }
        self.control.change_over(to, self.now().saturating_add(pause));
        self.data.disconnect(&mut self.machine);
        let from = self.shared.address_index.swap(to, Ordering::AcqRel);
        let [from, to] = [from, to].map(|at| self.addresses[at].clone());
        self.notify(Event::ChangedOver { from, to });
    }

    fn rejected(&mut self, model: String, key: Key, code: &'static str, text: String) {
        let rejection = Some((model.clone(), key, code));
        if self.last_rejection == rejection {
            return;
        }
        self.last_rejection = rejection;
        let (epoch, version) = key;
        let error = Error::Rejected {
            model: model.clone(),
            epoch,
            version,
            code: Code::from(code),
            text: text.clone(),
        };
        self.notify(Event::Rejected { model, epoch, version, code: Code::from(code), text });
        self.shared.ready_queue.reject(error);
    }

    fn refused(&mut self, code: Code, text: String) {
        self.notify(Event::Refused { code: code.clone(), text: text.clone() });
        if let [address] = &self.addresses[..] {
            let (worker, address) = (self.worker.clone(), address.clone());
            self.shared.ready_queue.refuse(Error::Refused { worker, address, code, text });
        } else {
            self.refusals.insert(self.shared.address_index(), (code, text));
        }
    }

    /// Ends a round in which no address gave this worker a session. If a publisher refused the
    /// worker, reports an error to the user.
    fn refused_everywhere(&mut self) {
        let refusals = std::mem::take(&mut self.refusals);
        let code = match refusals.values().next() {
            Some((code, _)) => code.clone(),
            None => return,
        };
        let answer = |(at, address): (usize, &String)| match refusals.get(&at) {
            Some((code, text)) => format!("{} ({}): {}", address, code, text),
            None => format!("{}: no session", address),
        };
        let text = self.addresses.iter().enumerate().map(answer).collect::<Vec<_>>().join("; ");
        let (worker, address) = (self.worker.clone(), self.addresses.join(", "));
        self.shared.ready_queue.refuse(Error::Refused { worker, address, code, text });
    }

    fn notify(&mut self, event: Event) {
        if let Some(listener) = &mut self.listener {
            listener(&event);
        }
    }
}

/// The sockets that have something to read.
struct Readable {
    control: bool,
    data: bool,
}

/// Closes the ready queue when the thread ends, also after a panic.
struct CloseQueue(Arc<Shared>);

impl Drop for CloseQueue {
    fn drop(&mut self) {
        self.0.ready_queue.close("its thread ended unexpectedly, which is a bug");
    }
}
