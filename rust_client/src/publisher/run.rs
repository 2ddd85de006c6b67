//! The publisher's thread: owns the sockets, passes messages to the machine, and carries out the machine's
//! decisions.
//!
//! Other threads submit work and wait for the answer. If this thread ends or fails, the waiting threads get
//! an error.

use super::bases::PatchCandidate;
use super::effects::{Effect, Payload, WorkerEvent, WorkerEventKind};
use super::grants::ByKey;
use super::keeper::Keeper;
use super::machine::PublisherMachine;
use super::offer::Offer;
use super::pub_socket::PubSocket;
use super::publication::PublishTerms;
use super::receipt::Receipt;
use super::router::{ReceivedMessages, Router};
use super::sealer::Sealer;
use super::status::WorkerStatus;
use super::subscriber::Queued;
use crate::error::Error;
use crate::messages::{control_topic, data_topic, encode, patch_topic, FromPublisher};
use crate::raw::fork::Process;
use crate::raw::os::give_memory_back;
use crate::transfer::Time;
use crate::waker::Waker;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::unix::io::AsRawFd;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(100); // between two ticks
const DISK_TIMEOUT: Duration = Duration::from_secs(10); // to write the last versions when the publisher closes
const LINGER: Duration = Duration::from_millis(200); // to send queued messages when the publisher closes

const OTHER_PROCESS: &str = "it belongs to the process that this one was forked from";

pub type Roster = BTreeMap<String, WorkerStatus>;
pub type OnWorker = Box<dyn FnMut(&WorkerEvent) + Send>;
/// Returns true if the workers are in the state that a caller waits for.
pub type Condition = Box<dyn Fn(&Roster) -> bool + Send>;

/// Work that other threads submit.
pub enum Work {
    Publish {
        model: String,
        offer: Offer,
        terms: PublishTerms,
        began: Instant,
        answer: Sender<Answer>,
    },
    /// Answer with the workers that accept patches of this model: of these names, or of all workers.
    PatchCandidates(String, Option<Vec<String>>, Sender<Vec<PatchCandidate>>),
    /// Answer with the status of all workers.
    Status(Sender<Roster>),
    /// Allow these keys, and no others.
    Grant(ByKey),
    /// Pass this text to the user's `on_worker` function, as a notice.
    Notice(String),
    /// Answer when the condition is true, if that is before this time.
    Watch(Condition, Instant, Sender<()>),
}

pub type Answer = Result<Receipt, Error>;

#[derive(Default)]
struct Inbox {
    work: VecDeque<Work>,
    stopping: bool,
    ended: Option<String>, // why the thread has ended
}

/// The state that the publisher's thread shares with other threads.
pub struct Shared {
    process: Process,
    inbox: Mutex<Inbox>,
    waker: Waker,
}

impl Shared {
    pub fn new() -> io::Result<Shared> {
        Ok(Shared { process: Process::this(), inbox: Mutex::default(), waker: Waker::new()? })
    }

    /// True in the process of the publisher's thread; false in a forked child.
    pub fn is_own_process(&self) -> bool {
        self.process.is_this()
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits work. Fails with `Error::PublisherClosed` if the thread is ending or has ended, or in a
    /// forked child.
    pub fn submit(&self, work: Work) -> Result<(), Error> {
        if !self.is_own_process() {
            return Err(self.closed_error());
        }
        let mut inbox = self.inbox();
        if inbox.stopping || inbox.ended.is_some() {
            drop(inbox);
            return Err(self.closed_error());
        }
        inbox.work.push_back(work);
        drop(inbox);
        self.waker.wake();
        Ok(())
    }

    /// Returns the error for a closed publisher, with the reason.
    pub fn closed_error(&self) -> Error {
        if !self.is_own_process() {
            return Error::PublisherClosed { reason: OTHER_PROCESS.to_owned() };
        }
        let ended = self.inbox().ended.clone();
        Error::PublisherClosed { reason: ended.unwrap_or_else(|| "close() was called".to_owned()) }
    }

    /// Makes the thread resolve the open calls and end.
    pub fn stop(&self) {
        self.inbox().stopping = true;
        self.waker.wake();
    }
}

/// The state of the publisher's thread.
pub struct Loop {
    pub machine: PublisherMachine,
    pub router: Router,
    pub data: PubSocket,
    pub shared: Arc<Shared>,
    pub keeper: Option<Keeper>,
    pub on_worker: Option<OnWorker>,
    /// Encrypts what is sent; `None` without keys.
    pub sealer: Option<Sealer>,
    answers: HashMap<u64, Sender<Answer>>, // of the open calls of publish, by id
    last_id: u64,                          // of a call of publish
    current_connection: u64,               // the control connection whose message is being handled
    watchers: Vec<(Condition, Instant, Sender<()>)>,
    recorded_epoch: u64, // the last epoch given to the state folder
    started_at: Instant,
}

/// When dropped, also by a panic, makes all waiting and later callers fail. The second field is the reason
/// for their errors; `None` means a panic.
struct Ending(Arc<Shared>, Option<String>);

impl Drop for Ending {
    fn drop(&mut self) {
        let mut inbox = self.0.inbox();
        inbox.ended = self.1.take().or_else(|| Some("its thread has failed".to_owned()));
        inbox.work.clear(); // drops the channels on which callers wait
    }
}

impl Loop {
    pub fn new(
        machine: PublisherMachine,
        router: Router,
        data: PubSocket,
        shared: Arc<Shared>,
        keeper: Option<Keeper>,
        on_worker: Option<OnWorker>,
        sealer: Option<Sealer>,
    ) -> Loop {
        Loop {
            recorded_epoch: machine.epoch(),
            machine,
            router,
            data,
            shared,
            keeper,
            on_worker,
            sealer,
            answers: HashMap::new(),
            last_id: 0,
            current_connection: 0,
            watchers: Vec::new(),
            started_at: Instant::now(),
        }
    }

    fn now(&self) -> Time {
        self.started_at.elapsed()
    }

    /// Runs until `Shared::stop` is called, or the sockets fail.
    pub fn run(mut self) {
        let mut ending = Ending(self.shared.clone(), None);
        let mut next_tick = Time::ZERO;
        while !self.shared.inbox().stopping {
            if let Err(error) = self.run_once(&mut next_tick) {
                ending.1 = Some(format!("its sockets failed: {}", error));
                drop(ending); // so that callers do not wait for the disk
                return self.close_keeper();
            }
        }
        self.do_work();
        let effects = self.machine.close(self.now());
        self.perform(effects);
        ending.1 = Some("close() was called".to_owned());
        self.linger();
        drop(ending);
        self.close_keeper();
    }

    /// Waits at most `DISK_TIMEOUT` until the last versions are stored. Notifies the user of versions that
    /// are not.
    fn close_keeper(mut self) {
        let keeper = self.keeper.take();
        // The machine owns the versions that the keeper still writes, so it must live until then.
        let Loop { machine: _machine, router, data, mut on_worker, .. } = self;
        drop((router, data)); // frees the bound addresses
        if let Some(text) = keeper.and_then(|mut keeper| keeper.close(DISK_TIMEOUT)) {
            let (kind, worker) = (WorkerEventKind::Notice, String::new());
            if let Some(on_worker) = &mut on_worker {
                on_worker(&WorkerEvent { kind, worker, text });
            }
        }
    }

    /// Sends queued messages for at most `LINGER`.
    fn linger(&mut self) {
        let end = self.now() + LINGER;
        let (data, control) = (self.data.ready(), self.router.ready());
        while (self.data.has_unsent() || self.router.has_unsent()) && self.now() < end {
            let mut items = data.items();
            let first = items.len();
            items.extend(control.items());
            if zmq::poll(&mut items, 20).is_err() {
                return;
            }
            for (id, readable) in data.found(&items[..first]) {
                self.data.process_events(id, readable, self.now());
            }
            for (id, readable) in control.found(&items[first..]) {
                self.router.process_events(id, readable, &|_| false, self.now());
                // ignores input
            }
        }
    }

    /// Runs the loop once: does submitted work, receives messages, pushes chunks, compares checksums, and
    /// ticks if a tick is due.
    fn run_once(&mut self, next_tick: &mut Time) -> io::Result<()> {
        self.do_work(); // first, because callers wait for it
        let busy = !self.topics_with_room().is_empty() || self.machine.is_comparing();
        let wait = if busy { Duration::ZERO } else { next_tick.saturating_sub(self.now()) };
        self.wait_for_events(wait)?;
        for topic in self.topics_with_room() {
            let effects = self.machine.push(&topic, self.now());
            self.perform(effects);
        }
        if self.machine.is_comparing() {
            let effects = self.machine.compare();
            self.perform(effects);
        }
        if self.now() >= *next_tick {
            let effects = self.machine.tick(self.now());
            self.perform(effects);
            self.data.tick(self.now());
            self.router.tick(self.now());
            self.report_closed();
            if let Some(sealer) = &mut self.sealer {
                let machine = &self.machine;
                sealer.tick(|subject| machine.offers(&subject.model, (subject.epoch, subject.version)));
            }
            let due = self.sealer.as_ref().map_or(false, |sealer| sealer.is_rekey_due(self.now()));
            if due {
                self.rekey();
            }
            self.answer_watchers();
            *next_tick = self.now() + TICK;
        }
        Ok(())
    }

    /// Returns the topics that have something to push and whose subscribers have room.
    fn topics_with_room(&self) -> Vec<String> {
        let room = |topic: &&String| self.data.has_room(topic);
        self.machine.pushing().filter(room).cloned().collect()
    }

    /// Waits for events on the sockets and handles them.
    fn wait_for_events(&mut self, wait: Duration) -> io::Result<()> {
        let (data, control) = (self.data.ready(), self.router.ready());
        let (data_listener, control_listener) =
            (self.data.listener_descriptor(self.now()), self.router.listener_descriptor(self.now()));
        let mut items = vec![zmq::PollItem::from_fd(self.shared.waker.as_raw_fd(), zmq::POLLIN)];
        items.extend(control_listener.map(|fd| zmq::PollItem::from_fd(fd, zmq::POLLIN)));
        items.extend(data_listener.map(|fd| zmq::PollItem::from_fd(fd, zmq::POLLIN)));
        let workers = items.len();
        items.extend(control.items());
        let subscribers = items.len();
        items.extend(data.items());
        match zmq::poll(&mut items, ((wait.as_micros() + 999) / 1000) as i64) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error.to_raw())),
        }
        let (control, data) =
            (control.found(&items[workers..subscribers]), data.found(&items[subscribers..]));
        let mut found = items[..workers].iter().map(|i| i.is_readable() || i.is_error());
        let mut next = || found.next().unwrap_or(false);
        let (woken, accept_control, accept_data) =
            (next(), control_listener.is_some() && next(), data_listener.is_some() && next());
        drop(found);
        drop(items);
        if woken {
            self.shared.waker.drain();
        }
        if accept_control {
            self.router.accept(self.now());
        }
        for (id, readable) in control {
            self.receive_messages(id, readable);
        }
        self.report_closed();
        for (id, readable) in data {
            self.receive_input(id, readable);
        }
        if accept_data {
            self.data.accept(self.now());
        }
        Ok(())
    }

    /// Handles the messages that arrived on a control connection.
    fn receive_messages(&mut self, id: u64, readable: bool) {
        let now = self.now();
        let machine = &self.machine;
        let ReceivedMessages { key, messages } =
            self.router.process_events(id, readable, &|key| machine.may_connect(key), now);
        let from = Router::identity(id);
        for message in messages {
            let effects =
                self.machine.receive_of(&from, &key, &message.header, message.payload_count, self.now());
            self.current_connection = id;
            self.perform(effects);
            if !self.router.is_open(id) {
                return; // the connection was closed
            }
        }
    }

    /// Reports closed connections to the machine.
    fn report_closed(&mut self) {
        for identity in self.router.take_closed() {
            let effects = self.machine.unreachable(&identity, self.now());
            self.perform(effects);
        }
    }

    /// Handles the events of a data connection. Answers each subscription with a beacon, which is sent only
    /// to this subscriber.
    fn receive_input(&mut self, id: u64, readable: bool) {
        let input = self.data.process_events(id, readable, self.now());
        if let Some(ticket) = input.ticket {
            let owner = self.machine.redeem(&ticket, self.now());
            if !self.data.admit(id, owner) {
                return;
            }
        }
        for topic in input.topics {
            if let Some(beacon) = self.machine.subscribed(&topic) {
                if let Some(message) = self.queued(topic, beacon, Payload::None) {
                    self.data.answer(id, message, self.now());
                }
            }
        }
        for report in input.reports {
            match self.machine.receive_report(&report, self.now()) {
                Some(effects) => self.perform(effects),
                None => self.data.note_invalid_report(id, self.now()),
            }
        }
    }

    /// Does all submitted work.
    fn do_work(&mut self) {
        loop {
            let work = self.shared.inbox().work.pop_front();
            match work {
                None => return,
                Some(Work::Status(answer)) => drop(answer.send(self.machine.status(self.now()))),
                Some(Work::Watch(condition, until, answer)) => {
                    self.watchers.push((condition, until, answer));
                    self.answer_watchers();
                }
                Some(Work::PatchCandidates(model, workers, answer)) => {
                    drop(answer.send(self.machine.patch_candidates(&model, workers.as_deref())));
                }
                Some(Work::Grant(by_key)) => {
                    let effects = self.machine.grant(by_key, self.now());
                    self.perform(effects);
                }
                Some(Work::Notice(text)) => self.notify(text),
                Some(Work::Publish { model, offer, terms, began, answer }) => {
                    self.publish(&model, offer, terms, began, answer);
                }
            }
        }
    }

    fn publish(
        &mut self,
        model: &str,
        offer: Offer,
        terms: PublishTerms,
        began: Instant,
        answer: Sender<Answer>,
    ) {
        self.last_id += 1;
        let started = began.saturating_duration_since(self.started_at);
        match self.machine.publish(self.last_id, model, offer, terms, started, self.now()) {
            Ok(effects) => {
                self.answers.insert(self.last_id, answer);
                self.perform(effects);
            }
            // The caller may have given up.
            Err(error) => drop(answer.send(Err(error))),
        }
    }

    /// Carries out effects. First records the epoch, and then informs the keeper whether publishes are open.
    fn perform(&mut self, effects: Vec<Effect>) {
        self.record_epoch();
        self.perform_all(effects);
        if let Some(keeper) = &self.keeper {
            keeper.set_publishing(!self.answers.is_empty());
        }
    }

    fn perform_all(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, message, payload } => self.send(&to, message, payload),
                Effect::Answer { to, header } => self.send_or_drop(&to, &header),
                Effect::Broadcast { topic, message, payload } => {
                    if let Some(message) = self.queued(topic, message, payload) {
                        self.data.send(message, self.now());
                    }
                }
                Effect::CloseRevoked => {
                    self.data.close_revoked(|owner| self.machine.may_read(owner));
                    self.rekey();
                }
                Effect::Withdraw { model } => {
                    let topics = [control_topic(&model), data_topic(&model), patch_topic(&model)];
                    self.data.withdraw(&topics, self.now());
                }
                Effect::HangUp => self.router.close(self.current_connection),
                Effect::GiveMemoryBack => give_memory_back(),
                Effect::Store { model, key, content, names } => {
                    if let Some(keeper) = &self.keeper {
                        keeper.offer(model, key, &content, names);
                    }
                }
                Effect::Resolve { id, receipt, achieved, missing } => {
                    self.resolve(id, receipt, achieved, missing)
                }
                Effect::Notify(event) => {
                    self.machine.record_event(&event, self.now());
                    if let Some(on_worker) = &mut self.on_worker {
                        on_worker(&event);
                    }
                    self.answer_watchers();
                }
            }
        }
    }

    /// Sends an answer to an observer, or a check to a worker. Drops a message that cannot be sent: the
    /// observer then repeats its request.
    fn send_or_drop(&mut self, to: &[u8], header: &[u8]) {
        let _ = self.router.send(to, header, &Payload::None, self.now());
    }

    /// Sends a message to one worker, encrypted if there are keys.
    fn send(&mut self, to: &[u8], message: FromPublisher, payload: Payload) {
        let sealed = match &mut self.sealer {
            Some(sealer) => sealer.seal_for_one(message, payload),
            None => Some((message, payload)),
        };
        let sent = sealed.map_or(true, |(message, payload)| {
            self.router.send(to, &encode(&message), &payload, self.started_at.elapsed())
        });
        if !sent {
            let effects = self.machine.unreachable(to, self.now());
            self.perform(effects);
        }
    }

    /// Returns a message for the queues of subscribers, encrypted if there are keys. Returns `None` if the
    /// memory for its bytes cannot be allocated.
    fn queued(&mut self, topic: String, message: FromPublisher, payload: Payload) -> Option<Queued> {
        let (message, payload) = match &mut self.sealer {
            Some(sealer) => sealer.seal_for_all(message, payload)?,
            None => (message, payload),
        };
        Some(Queued::new(topic, &encode(&message), &payload))
    }

    /// Replaces the group key. Workers that do not get the new key cannot decrypt later messages (E6).
    fn rekey(&mut self) {
        let now = self.now();
        if let Some(sealer) = &mut self.sealer {
            sealer.rekey(now);
            let key = sealer.key();
            let effects = self.machine.set_group_key(key);
            self.perform(effects);
        }
    }

    /// Writes the epoch to the state folder if it has changed. Called before effects are carried out, from
    /// which workers learn the epoch.
    fn record_epoch(&mut self) {
        let epoch = self.machine.epoch();
        if epoch != self.recorded_epoch {
            self.recorded_epoch = epoch;
            if let Some(text) = self.keeper.as_ref().and_then(|keeper| keeper.record(epoch)) {
                self.notify(text);
            }
        }
    }

    fn notify(&mut self, text: String) {
        let (kind, worker) = (WorkerEventKind::Notice, String::new());
        self.perform_all(vec![Effect::Notify(WorkerEvent { kind, worker, text })]);
    }

    /// Answers the caller of a publish.
    fn resolve(&mut self, id: u64, receipt: Receipt, achieved: bool, missing: String) {
        if let Some(answer) = self.answers.remove(&id) {
            let result = if achieved {
                Ok(receipt)
            } else {
                Err(Error::Publish { receipt: Box::new(receipt), missing })
            };
            let _ = answer.send(result); // the caller may have given up
        }
    }

    /// Answers the callers whose condition is true. Drops those whose time is over.
    fn answer_watchers(&mut self) {
        if !self.watchers.is_empty() {
            let roster = self.machine.status(self.now());
            self.watchers.retain(|(condition, until, answer)| {
                let met = condition(&roster);
                let _ = met && answer.send(()).is_ok(); // the caller may have given up
                !met && Instant::now() < *until
            });
        }
    }
}
