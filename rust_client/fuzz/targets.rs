//! What is fuzzed, and what must hold whatever comes.

use crate::dice::Dice;
use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weightbus::delta::Patch;
use weightbus::digest::bytes_of_hex;
use weightbus::effects::{Effect, Host};
use weightbus::layout::Layout;
use weightbus::limits::{Timing, WINDOW_CHUNKS};
use weightbus::machine::{Ticket, Wanted, WorkerMachine};
use weightbus::messages::{encode, from_publisher, from_worker, AnnounceCommit, FromWorker, Hello};
use weightbus::publisher::content::Copier;
use weightbus::publisher::effects::Effect as PublisherEffect;
use weightbus::publisher::machine::{Age, Draw, PublisherMachine};
use weightbus::publisher::publication::PublishTerms;
use weightbus::staging::StagedVersion;
use weightbus::zmtp::{Place, Places, Published, PublishedPayload, Stream};
use weightbus::{Dtype, TensorView};

/// A target: one case, made from the corpus by the dice.
pub type Target = fn(&Corpus, &mut Dice);

/// What can be fuzzed.
pub const TARGETS: [(&str, Target); 7] = [
    ("header", header),
    ("layout", layout),
    ("stream", stream),
    ("machine", machine),
    ("patch", patch),
    ("publisher", publisher),
    ("relays", relays),
];

type Frames = Vec<Vec<u8>>;

/// The golden vectors, as bytes.
pub struct Corpus {
    headers: Vec<Vec<u8>>,
    /// What workers and observers say.
    words: Vec<Vec<u8>>,
    /// What relays and others say in sequences with relays.
    relayed: Vec<Vec<u8>>,
    layouts: Vec<Vec<u8>>,
    /// Of sequences: the milliseconds that pass, or a message and whether it was published.
    sequences: Vec<Vec<Step>>,
    /// With the layouts and the bases that they are for.
    patches: Vec<(Layout, Vec<u8>, Vec<u8>)>,
}

#[derive(Clone)]
enum Step {
    Wait(u64),
    Message { pushed: bool, frames: Frames },
}

impl Corpus {
    pub fn read(folder: &Path) -> Result<Corpus, Box<dyn Error>> {
        let list = |file: &str, name: &str| -> Result<Vec<Value>, Box<dyn Error>> {
            let table: Value = serde_json::from_slice(&fs::read(folder.join(file))?)?;
            Ok(table[name].as_array().ok_or("a table without cases")?.clone())
        };
        let cases = |file: &str| list(file, "cases");
        let bytes = |spec: &Value| -> io::Result<Vec<u8>> {
            match (spec["text"].as_str(), spec["hex"].as_str(), spec["file"].as_str()) {
                (Some(text), _, _) => Ok(text.as_bytes().to_vec()),
                (_, Some(digits), _) => Ok(bytes_of_hex(digits)),
                (_, _, Some(file)) => fs::read(folder.join(file)),
                _ => Ok(Vec::new()),
            }
        };
        let frames = |list: &Value| -> io::Result<Frames> {
            list.as_array().into_iter().flatten().map(bytes).collect()
        };
        let mut headers = Vec::new();
        let of_features = [list("sealing.json", "headers")?, list("patching.json", "headers")?].concat();
        let all = [cases("messages.json")?, of_features].concat();
        for case in all.iter().filter(|case| case["direction"] == "from_publisher") {
            headers.extend(frames(&case["frames"])?.into_iter().take(1).filter(|header| header.len() < 2000));
        }
        let mut words = Vec::new();
        for case in all.iter().filter(|case| case["direction"] != "from_publisher") {
            words.extend(frames(&case["frames"])?.into_iter().take(1).filter(|header| header.len() < 2000));
        }
        let mut relayed = Vec::new();
        let of_relays = |case: &Value| {
            case["rules"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|rule| rule.as_str().map_or(false, |r| r.starts_with('R')))
        };
        for case in cases("publisher_sequences.json")?.iter().filter(|case| of_relays(case)) {
            let messages = case["steps"].as_array().into_iter().flatten().map(|step| &step["message"]);
            relayed.extend(
                messages.filter(|message| message.is_object()).map(|its| its.to_string().into_bytes()),
            );
        }
        let mut layouts = Vec::new();
        for case in cases("layouts.json")? {
            layouts.push(bytes(&case["header"])?);
        }
        let mut sequences = Vec::new();
        for case in cases("sequences.json")? {
            let mut steps = Vec::new();
            for step in case["steps"].as_array().into_iter().flatten() {
                steps.push(match step["wait_ms"].as_u64() {
                    Some(milliseconds) => Step::Wait(milliseconds),
                    None => {
                        let pushed = step.get("data").is_some();
                        let frames = frames(&step[if pushed { "data" } else { "control" }])?;
                        Step::Message { pushed, frames }
                    }
                });
            }
            sequences.push(steps);
        }
        let mut patches = Vec::new();
        for case in cases("deltas.json")? {
            let layout = Layout::parse(&bytes(&case["layout"])?).map_err(|error| error.to_string())?;
            let mut base = Vec::new();
            for run in case["base"].as_array().into_iter().flatten() {
                let times = run[1].as_u64().ok_or("a base without a number")?;
                base.extend(bytes_of_hex(run[0].as_str().unwrap_or_default()).repeat(times as usize));
            }
            if base.len() < 2000 {
                patches.push((layout, base, bytes(&case["patch"])?));
            }
        }
        Ok(Corpus { headers, words, relayed, layouts, sequences, patches })
    }
}

/// A header is decoded or refused; what was decoded means the same when it is written again.
fn header(corpus: &Corpus, dice: &mut Dice) {
    let mut bytes = dice.pick(&corpus.headers).clone();
    dice.change(&mut bytes, &corpus.headers);
    let payloads = dice.below(3);
    if let Ok(message) = from_publisher(&bytes, payloads) {
        assert_eq!(from_publisher(&encode(&message), payloads), Ok(message));
    }
}

/// A layout is refused, or its tensors lie end to end in as many bytes as it says.
fn layout(corpus: &Corpus, dice: &mut Dice) {
    let mut bytes = dice.pick(&corpus.layouts).get(8..).unwrap_or_default().to_vec();
    dice.change(&mut bytes, &corpus.layouts);
    let mut header = (bytes.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&bytes);
    if dice.one_in(20) {
        dice.change(&mut header, &corpus.layouts);
    }
    check_layout(&header);
}

fn check_layout(header: &[u8]) {
    if let Ok(layout) = Layout::parse(header) {
        let end = layout.tensors.iter().fold(0, |at, tensor| {
            assert_eq!(tensor.begin, at);
            let elements: u128 = tensor.shape.iter().map(|&size| u128::from(size)).product();
            let bits = elements * u128::from(tensor.dtype.bits());
            assert_eq!(bits, 8 * u128::from(tensor.end - tensor.begin));
            tensor.end
        });
        assert_eq!(layout.nbytes, end);
        assert!(layout.aliases.values().all(|kept| layout.get(kept).is_some()));
    }
}

/// A patch is refused, and then not a byte has changed, or all of it can be read.
fn patch(corpus: &Corpus, dice: &mut Dice) {
    let (layout, base, patch) = dice.pick(&corpus.patches);
    let (head, body) = patch.split_at(patch.len().min(120)); // digests, which almost no change leaves right
    let (mut patch, mut body) = (head.to_vec(), body.to_vec());
    let spoilt = if dice.one_in(8) { &mut patch } else { &mut body };
    dice.change(spoilt, &[]);
    patch.extend_from_slice(&body);
    if let Ok(patch) = Patch::parse(layout, &patch) {
        let mut data = base.clone();
        if patch.apply_unchecked(&mut data).is_err() {
            assert_eq!(&data, base);
        }
    }
}

/// A stream of ZMTP comes in pieces of any size; what comes out does not depend on them.
fn stream(corpus: &Corpus, dice: &mut Dice) {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04XPUB");
    for _ in 0..1 + dice.below(4) {
        let step = any_step(corpus, dice);
        if let Step::Message { frames, .. } = step {
            write_frame(&mut bytes, b"m/ctl", frames.is_empty());
            for (at, frame) in frames.iter().enumerate() {
                write_frame(&mut bytes, frame, at + 1 == frames.len());
            }
        }
    }
    if !dice.one_in(4) {
        dice.change(&mut bytes, &corpus.headers);
    }
    let whole = read_stream(&bytes, &mut || usize::MAX);
    let pieces = read_stream(&bytes, &mut || 1 + dice.below(50));
    assert_eq!(whole, pieces);
}

/// Any step of any sequence.
fn any_step(corpus: &Corpus, dice: &mut Dice) -> Step {
    let sequence = dice.pick(&corpus.sequences);
    dice.pick(sequence).clone()
}

fn write_frame(bytes: &mut Vec<u8>, frame: &[u8], last: bool) {
    if frame.len() < 256 {
        bytes.extend_from_slice(&[u8::from(!last), frame.len() as u8]);
    } else {
        bytes.push(2 + u8::from(!last));
        bytes.extend_from_slice(&(frame.len() as u64).to_be_bytes());
    }
    bytes.extend_from_slice(frame);
}

/// Memory for one payload at a time.
#[derive(Default)]
struct OnePlace {
    bytes: Vec<u8>,
    filled: usize,
    tickets: u32,
}

impl Places for OnePlace {
    type Ticket = u32;

    fn place(&mut self, header: &[u8], size: usize) -> Place<u32> {
        match header.len() % 3 {
            0 => Place::NewMemory,
            1 => Place::Nowhere,
            _ if size > 1 << 20 => Place::Nowhere,
            _ => {
                self.tickets += 1;
                self.bytes = vec![0; size];
                self.filled = 0;
                Place::InBuffer(self.tickets)
            }
        }
    }

    fn unfilled(&mut self, ticket: u32) -> Option<&mut [u8]> {
        (ticket == self.tickets).then_some(&mut self.bytes[self.filled..])
    }

    fn received(&mut self, ticket: u32, count: usize) {
        assert_eq!(ticket, self.tickets);
        self.filled += count;
        assert!(self.filled <= self.bytes.len());
    }

    fn cancel(&mut self, _ticket: u32) {
        self.tickets += 1;
    }
}

struct Pieces<'a, 'b> {
    rest: &'a [u8],
    size: &'b mut dyn FnMut() -> usize,
}

impl Read for Pieces<'_, '_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = (self.size)().min(to.len());
        self.rest.read(&mut to[..count])
    }
}

/// Headers, and how many payloads each had.
fn read_stream(bytes: &[u8], size: &mut dyn FnMut() -> usize) -> Vec<(Vec<u8>, usize)> {
    let mut places = OnePlace::default();
    let mut stream = Stream::new(&["m/ctl".to_owned()].into_iter().collect());
    let mut pieces = Pieces { rest: bytes, size };
    let mut messages = Vec::new();
    loop {
        let more = matches!(stream.read(&mut pieces, &mut places), Ok(count) if count > 0);
        messages
            .extend(stream.arrived.drain(..).map(|published| (published.header, published.payload_count)));
        if !more {
            break;
        }
        assert!(stream.missing() > 0);
    }
    stream.close(&mut places);
    assert!(stream.outgoing.len() <= 64 + 60 + 2 * bytes.len() + 20);
    messages
}

/// Whatever workers say in whatever order, and whoever they are: the publisher goes on, says nothing malformed, and its
/// epoch never goes down.
fn publisher(corpus: &Corpus, dice: &mut Dice) {
    publish(&corpus.words, corpus, dice);
}

/// The same of relays and of the workers behind them, which are sent nothing.
fn relays(corpus: &Corpus, dice: &mut Dice) {
    publish(&corpus.relayed, corpus, dice);
}

fn publish(words: &[Vec<u8>], corpus: &Corpus, dice: &mut Dice) {
    let age: Age = Box::new(|| Duration::from_secs(1000));
    let mut drawn = 0_u64;
    let digits = move || {
        drawn += 1;
        Some(format!("{:032x}", drawn))
    };
    let digits = std::sync::Mutex::new(digits);
    let draw: Draw = Box::new(move || digits.lock().map(|mut next| next()).unwrap_or_default());
    let mut machine = PublisherMachine::new(7, "tcp://*:1", Timing::default(), Some(age), Some(draw))
        .clock(Box::new(|| 1_700_000_000_000));
    let (mut now, mut id, mut copier) = (Duration::from_secs(1), 0, Copier::default());
    let mut epoch = machine.epoch();
    for _ in 0..40 {
        now += Duration::from_millis(dice.below(800) as u64);
        let from = [dice.below(4) as u8];
        let effects = match dice.below(12) {
            0 => machine.tick(now),
            1 => machine.unreachable(&from, now),
            2 => {
                let bytes = vec![id as u8; dice.below(100)];
                let shape = [bytes.len() as u64];
                let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &shape, bytes: &bytes };
                let content = copier.copy(&[tensor], 1 + dice.below(20) as u64).map(Arc::new);
                id += 1;
                let mut terms = PublishTerms::default();
                if dice.one_in(3) {
                    terms.workers =
                        Some(machine.status(now).into_keys().filter(|_| dice.one_in(2)).collect());
                }
                if dice.one_in(3) {
                    terms.commit = AnnounceCommit::Together;
                }
                let model = *dice.pick(&["policy", "m"]);
                content
                    .ok()
                    .and_then(|its| machine.publish(id, model, its, terms, now, now).ok())
                    .unwrap_or_default()
            }
            _ => {
                let mut word = dice.pick(words).clone();
                if dice.one_in(2) {
                    dice.change(&mut word, &corpus.words);
                }
                machine.receive(&from, &word, dice.below(3), now)
            }
        };
        for effect in effects {
            if let PublisherEffect::Send { to, message, payload } = effect {
                assert!(!to.is_empty(), "{:?}", message);
                let payloads = usize::from(payload.bytes().is_some());
                assert_eq!(from_publisher(&encode(&message), payloads).as_ref(), Ok(&message));
            }
        }
        let here = machine.status(now).values().filter(|worker| worker.through.is_empty()).count();
        assert!(machine.epoch() >= epoch && here <= 4);
        epoch = machine.epoch();
    }
}

struct AnyLayout;

impl Host for AnyLayout {
    fn fault(&self, _model: &str, layout: &Layout) -> Option<String> {
        (layout.tensors.len() > 50).then(|| "too many".to_owned())
    }
}

/// Whatever a publisher says in whatever order: the worker says nothing malformed, asks for no more
/// than a window, takes no more memory than it may, and never goes back.
fn machine(corpus: &Corpus, dice: &mut Dice) {
    let mut worker = Worker::new();
    if dice.one_in(8) {
        worker.machine.require_sealed();
    }
    if dice.one_in(2) {
        worker.machine.accept_patches();
    }
    let mut sequence = dice.pick(&corpus.sequences).clone();
    for _ in 0..dice.below(6) {
        // Steps of another sequence, changed: the session's epoch and models stay the same mostly.
        let step = any_step(corpus, dice);
        let at = dice.below(sequence.len() + 1);
        sequence.insert(at, step);
    }
    for step in sequence {
        match step {
            Step::Wait(milliseconds) => worker.wait(Duration::from_millis(milliseconds % 20_000)),
            Step::Message { mut pushed, mut frames } => {
                if !frames.is_empty() && dice.one_in(3) {
                    let at = if dice.one_in(4) { dice.below(frames.len()) } else { 0 };
                    dice.change(&mut frames[at], &corpus.headers);
                }
                pushed ^= dice.one_in(10);
                for _ in 0..1 + usize::from(dice.one_in(8)) {
                    worker.take(&frames, pushed, dice);
                }
            }
        }
        worker.user(dice);
    }
}

struct Worker {
    machine: WorkerMachine,
    now: Duration,
    ready: Vec<StagedVersion>,
    runs: BTreeMap<String, (u64, u64)>,
}

const BYTES_MAX: u64 = 1 << 16;

impl Worker {
    fn new() -> Worker {
        let identity = Hello { name: "w".to_owned(), instance: "0".repeat(32), ..Hello::default() };
        let wanted = ["m", "n", "policy"].map(|model| Wanted { model: model.to_owned(), nbytes: 0 });
        let machine =
            WorkerMachine::new(identity, &wanted, Arc::new(AnyLayout), BYTES_MAX, Timing::default());
        Worker { machine, now: Duration::from_secs(1), ready: Vec::new(), runs: BTreeMap::new() }
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = until.min(self.now + Duration::from_millis(100));
            let mut effects = self.machine.connected(self.now);
            effects.extend(self.machine.tick(self.now));
            self.perform(effects);
        }
    }

    fn take(&mut self, frames: &[Vec<u8>], pushed: bool, dice: &mut Dice) {
        let (header, payloads) = match frames.split_first() {
            Some((header, payloads)) => (&header[..], payloads),
            None => (&[][..], frames),
        };
        let effects = if pushed {
            let payload = match payloads.first() {
                Some(bytes) => self.receive(header, bytes, dice),
                None => PublishedPayload::None,
            };
            let published = Published { header: header.to_vec(), payload_count: payloads.len(), payload };
            self.machine.receive_published(&published, self.now)
        } else {
            let payloads: Vec<&[u8]> = payloads.iter().map(|payload| &payload[..]).collect();
            self.machine.receive(header, &payloads, self.now)
        };
        self.perform(effects);
    }

    /// Receives a payload where the machine wants it, with interruptions.
    fn receive(&mut self, header: &[u8], bytes: &[u8], dice: &mut Dice) -> PublishedPayload<Ticket> {
        match self.machine.place(header, bytes.len()) {
            Place::InBuffer(ticket) => {
                for piece in bytes.chunks(1 + dice.below(bytes.len())) {
                    if dice.one_in(20) {
                        let effects = self.machine.tick(self.now);
                        self.perform(effects);
                    }
                    match self.machine.unfilled(ticket) {
                        Some(room) => room[..piece.len()].copy_from_slice(piece),
                        None => return PublishedPayload::Bytes(Vec::new()),
                    }
                    self.machine.received(ticket, piece.len());
                }
                if dice.one_in(20) {
                    self.machine.cancel(ticket);
                }
                PublishedPayload::InPlace(ticket)
            }
            Place::NewMemory => PublishedPayload::Bytes(bytes.to_vec()),
            Place::Nowhere if dice.one_in(2) => PublishedPayload::Bytes(Vec::new()),
            Place::Nowhere => PublishedPayload::Bytes(bytes.to_vec()), // it was short
        }
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    let read = from_worker(&encode(&message), 0);
                    assert_eq!(read.as_ref(), Ok(&message));
                    if let FromWorker::Fetch(fetch) = message {
                        assert!(
                            fetch.count as usize <= WINDOW_CHUNKS && (fetch.version > 0 || fetch.count == 0)
                        );
                    }
                }
                Effect::Ready(staged) => {
                    assert!(staged.layout.nbytes <= BYTES_MAX);
                    self.ready.push(staged);
                }
                Effect::Decode(mut job) => {
                    let done = job.run(&|| false);
                    let effects = self.machine.decoded(job, done, self.now);
                    self.perform(effects);
                }
                _ => {}
            }
        }
    }

    /// Does something with what is ready, as a user may.
    fn user(&mut self, dice: &mut Dice) {
        while !self.ready.is_empty() && !dice.one_in(3) {
            let staged = self.ready.remove(dice.below(self.ready.len()));
            let (model, key) = (staged.model.clone(), staged.key);
            drop(staged);
            let older = self.runs.get(&model).map_or(false, |runs| *runs >= key);
            if !older {
                self.machine.taken(&model, key);
            }
            let effects = match dice.below(8) {
                _ if older => self.machine.dropped(&model, key, self.now),
                0 => self.machine.failed(&model, key, "a test", true, self.now),
                3 => {
                    self.runs.remove(&model);
                    self.machine.failed(&model, key, "a test", false, self.now)
                }
                1 => self.machine.stale(&model, key, self.now),
                2 => self.machine.dropped(&model, key, self.now),
                _ => {
                    self.runs.insert(model.clone(), key);
                    self.machine.applied(&model, key, "", None, "", self.now)
                }
            };
            self.perform(effects);
            let running = self.machine.follower(&model).and_then(|follower| follower.running());
            let running = running.map(|running| (running.epoch, running.version));
            assert_eq!(running, self.runs.get(&model).copied());
        }
    }
}
