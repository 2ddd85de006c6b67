//! The worker as its user has it, against a publisher on real sockets of the loopback.

mod publisher;

use publisher::{Message, Publisher, Version, MODEL};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use weightbus::messages::Failed;
use weightbus::{
    Builder, Code, Error, Event, Model, ModelState, Offer, Tensor, Timing, Update, UpdateStream, Worker, BF16,
};

const LONG: Duration = Duration::from_secs(20); // for what takes milliseconds

/// A publisher with its thread and sockets.
struct Running {
    address: String,
    publisher: Arc<Mutex<Publisher>>,
    outgoing: Arc<Mutex<Vec<(String, Message)>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(epoch: u64, address: &str) -> Running {
        let context = zmq::Context::new();
        let control = bound(&context, zmq::ROUTER, address);
        let data = bound(&context, zmq::XPUB, "tcp://127.0.0.1:*");
        let endpoint = |socket: &zmq::Socket| socket.get_last_endpoint().unwrap().unwrap();
        let address = endpoint(&control);
        let told = endpoint(&data).replace("127.0.0.1", "*");
        let publisher = Arc::new(Mutex::new(Publisher::new(epoch, &told)));
        let outgoing = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let shared = (publisher.clone(), outgoing.clone(), stop.clone());
        let thread = thread::spawn(move || serve(&control, &data, &shared.0, &shared.1, &shared.2));
        Running { address, publisher, outgoing, stop, thread: Some(thread) }
    }

    fn publish(&self, version: Version) {
        let pushed = self.publisher.lock().unwrap().publish(version, true);
        let last = pushed.len() - 1;
        let topic = |at| format!("{}/{}", MODEL, if at == 0 || at == last { "ctl" } else { "dat" });
        let messages = pushed.into_iter().enumerate().map(|(at, message)| (topic(at), message));
        self.outgoing.lock().unwrap().extend(messages);
    }

    /// Publishes a version as its first patch.
    fn publish_patch(&self, version: Version) {
        let mut publisher = self.publisher.lock().unwrap();
        let announcement = publisher.publish(version.clone(), true).remove(0);
        let patch = version.pushed_patch(publisher.epoch).into_iter();
        let mut outgoing = self.outgoing.lock().unwrap();
        outgoing.push((format!("{}/ctl", MODEL), announcement));
        outgoing.extend(patch.map(|message| (format!("{}/dlt", MODEL), message)));
    }

    /// Waits until something holds of the publisher.
    fn wait(&self, what: &str, holds: impl Fn(&Publisher) -> bool) {
        let end = Instant::now() + LONG;
        while !holds(&self.publisher.lock().unwrap()) {
            assert!(Instant::now() < end, "{} did not happen", what);
            thread::yield_now();
        }
    }

    fn close(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.close();
    }
}

/// Binds a socket; an address whose last owner is just closing is free in a moment.
fn bound(context: &zmq::Context, kind: zmq::SocketType, address: &str) -> zmq::Socket {
    let end = Instant::now() + LONG;
    loop {
        let socket = context.socket(kind).unwrap();
        socket.set_linger(0).unwrap();
        match socket.bind(address) {
            Ok(()) => return socket,
            Err(error) => assert!(Instant::now() < end, "{}: {}", address, error),
        }
        thread::yield_now();
    }
}

fn serve(
    control: &zmq::Socket,
    data: &zmq::Socket,
    publisher: &Mutex<Publisher>,
    outgoing: &Mutex<Vec<(String, Message)>>,
    stop: &AtomicBool,
) {
    while !stop.load(Ordering::Relaxed) {
        let mut items = [control.as_poll_item(zmq::POLLIN), data.as_poll_item(zmq::POLLIN)];
        zmq::poll(&mut items, 5).unwrap();
        while let Ok(frames) = control.recv_multipart(zmq::DONTWAIT) {
            for (header, payloads) in publisher.lock().unwrap().hear(&frames[1]) {
                let mut answer = vec![frames[0].clone(), header];
                answer.extend(payloads);
                control.send_multipart(answer, 0).unwrap();
            }
        }
        while let Ok(subscription) = data.recv_bytes(zmq::DONTWAIT) {
            if subscription.starts_with(b"\x01") && subscription.ends_with(b"/ctl") {
                let (header, _) = publisher.lock().unwrap().beacon();
                data.send_multipart([subscription[1..].to_vec(), header], 0).unwrap();
            }
        }
        for (topic, (header, payloads)) in outgoing.lock().unwrap().drain(..) {
            let mut frames = vec![topic.into_bytes(), header];
            frames.extend(payloads);
            data.send_multipart(frames, 0).unwrap();
        }
    }
}

fn update(worker: &Worker) -> Update {
    worker.receive(LONG).expect("nothing is wrong").expect("a version comes in time")
}

fn bytes_model(nbytes: usize) -> Model {
    Model::new([Tensor::new("w", &[nbytes as u64], vec![0u8; nbytes])]).unwrap()
}

#[test]
fn a_late_worker_fetches_and_then_takes_what_is_pushed() {
    let mut server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![7; 100_000], 10_000));
    let model = bytes_model(100_000);
    let worker = Worker::builder(&server.address).name("w").model(MODEL, &model).connect().unwrap();
    assert_eq!(update(&worker).version, 1);
    assert_eq!(model.read().get::<u8>("w").unwrap(), &[7; 100_000][..]);
    assert_eq!(worker.state().epoch, Some(1));
    assert_eq!(worker.state().models[MODEL].running, Some((1, 1))); // it is of now
    let pushed = Version::of_bytes(2, (0..100_000u32).map(|i| (i % 251) as u8).collect(), 10_000);
    server.publish(pushed.clone());
    let second = update(&worker);
    assert_eq!((second.version, &second.digest), (2, &pushed.digest()));
    assert_eq!(model.read().version(), Some((1, 2)));
    assert_eq!(model.read().get::<u8>("w").unwrap(), &pushed.data[..]);
    server.wait("the acknowledgement", |p| {
        p.applied.iter().any(|a| a.version == 2 && a.digest == pushed.digest())
    });
    worker.close();
    server.wait("the goodbye", |p| p.left);
    assert!(matches!(worker.receive(LONG), Err(Error::Closed { .. })));
    server.close();
}

#[test]
fn a_worker_finds_a_publisher_that_restarts() {
    let mut server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(5, vec![1; 10], 4));
    let worker = Worker::builder(&server.address).name("w").snapshots(MODEL).connect().unwrap();
    assert_eq!(worker.wait_joined(LONG).unwrap(), Some(1));
    let first = update(&worker);
    assert_eq!((first.epoch, first.version), (1, 5));
    server.close();
    let server = Running::start(2, &server.address);
    server.publish(Version::of_bytes(1, vec![2; 10], 4));
    let second = update(&worker);
    assert_eq!((second.epoch, second.version), (2, 1));
    // A snapshot stays what it was.
    assert_eq!(&first.snapshot.unwrap().get::<u8>("w").unwrap()[..], [1; 10]);
    assert_eq!(&worker.snapshot(MODEL).unwrap().get::<u8>("w").unwrap()[..], [2; 10]);
}

#[test]
fn a_model_of_another_shape_is_refused_with_words() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    let model = bytes_model(11);
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let worker = Worker::builder(&server.address)
        .name("w")
        .model(MODEL, &model)
        .on_event(move |event: &Event| told.lock().unwrap().push(event.clone()))
        .connect()
        .unwrap();
    let error = worker.receive(LONG).unwrap_err();
    assert!(error.to_string().contains("w: shape [10] published, [11] here"), "{}", error);
    server.wait("the report", |p| p.failed.iter().any(|failed| failed.code == "layout-mismatch"));
    assert!(events.lock().unwrap().iter().any(|event| matches!(event, Event::Rejected { version: 1, .. })));
    assert_eq!(model.read().version(), None);
}

#[test]
fn a_reader_keeps_a_version_until_it_lets_go() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![1; 1000], 100));
    let model = bytes_model(1000);
    let worker = Worker::builder(&server.address).name("w").model(MODEL, &model).connect().unwrap();
    update(&worker);
    server.publish(Version::of_bytes(2, vec![2; 1000], 100));
    {
        let weights = model.read();
        assert!(worker.receive(Duration::from_millis(300)).unwrap().is_none());
        assert_eq!(weights.get::<u8>("w").unwrap(), &[1; 1000][..]);
    }
    assert_eq!(update(&worker).version, 2);
    assert_eq!(model.read().get::<u8>("w").unwrap(), &[2; 1000][..]);
}

#[test]
fn who_waits_for_a_reader_learns_that_the_worker_is_closed() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    let model = bytes_model(10);
    let worker = Worker::builder(&server.address).name("w").model(MODEL, &model).connect().unwrap();
    update(&worker);
    let weights = model.read();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| worker.receive(LONG));
        server.publish(Version::of_bytes(2, vec![2; 10], 4));
        let end = Instant::now() + LONG;
        while worker.state().models[MODEL].ready != Some((1, 2)) {
            assert!(Instant::now() < end);
            thread::yield_now();
        }
        let begun = Instant::now();
        worker.close();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Closed { .. })));
        assert!(begun.elapsed() < LONG / 2, "it waited for the reader");
    });
    drop(weights);
    assert!(matches!(worker.receive(LONG), Err(Error::Closed { .. })));
    assert_eq!(model.read().version(), Some((1, 1)));
}

#[test]
fn a_stream_ends_though_somebody_reads() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    let model = bytes_model(10);
    let worker = Arc::new(Worker::builder(&server.address).name("w").model(MODEL, &model).connect().unwrap());
    let mut stream = worker.stream().unwrap();
    assert_eq!(next(&mut stream).unwrap().unwrap().version, 1);
    let weights = model.read();
    server.publish(Version::of_bytes(2, vec![2; 10], 4));
    let end = Instant::now() + LONG;
    while worker.state().models[MODEL].ready != Some((1, 2)) {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
    worker.close();
    assert!(next(&mut stream).is_none());
    assert_eq!(weights.version(), Some((1, 1)));
}

#[test]
fn what_cannot_work_is_said_at_once() {
    let model = bytes_model(1);
    let text = |result: Result<Worker, Error>| result.map(drop).unwrap_err().to_string();
    assert!(text(Worker::builder("nowhere").model("m", &model).connect()).contains("tcp://HOST:PORT"));
    assert!(text(Worker::builder("tcp://127.0.0.1:1").connect()).contains("1 to 64"));
    assert!(text(Worker::builder("tcp://127.0.0.1:1").model("a b", &model).connect()).contains("cannot name"));
    let twice = Worker::builder("tcp://127.0.0.1:1").model("m", &model).snapshots("m").connect();
    assert!(text(twice).contains("twice"));
    let never =
        Worker::builder("tcp://127.0.0.1:1").model("m", &model).apply_timeout(Duration::ZERO).connect();
    assert!(text(never).contains("at most a day"));
}

#[test]
fn what_changed_is_patched_into_memory_of_every_kind() {
    const LARGE: usize = 2 << 20; // so that pages change places
    let zeros = || Model::new([Tensor::zeros("w", weightbus::Dtype::U8, &[LARGE as u64])]).unwrap();
    type Build = fn(Builder, &Model) -> Builder;
    let kinds: [(Option<Model>, Build); 5] = [
        (None, |builder, _| builder.snapshots(MODEL)),
        (Some(bytes_model(LARGE)), |builder, model| builder.model(MODEL, model)),
        (Some(zeros()), |builder, model| builder.model(MODEL, model)),
        (Some(bytes_model(LARGE)), |builder, model| builder.model(MODEL, model).partial(true)), // kept once more
        (Some(zeros()), |builder, model| builder.model(MODEL, model).cast(true)),
    ];
    for (kind, (model, build)) in kinds.into_iter().enumerate() {
        let server = Running::start(1, "tcp://127.0.0.1:*");
        let builder = Worker::builder(&server.address).name("w");
        let worker = build(builder, model.as_ref().unwrap_or(&bytes_model(1))).connect().unwrap();
        let mut version = Version::of_bytes(1, (0..LARGE).map(|at| (at % 251) as u8).collect(), 1 << 20);
        version.keep = true;
        server.publish(version.clone());
        assert_eq!(update(&worker).encoding, "raw");
        for number in 2..4 {
            let mut data = version.data.clone();
            data.iter_mut().skip(number).step_by(50_000).for_each(|byte| *byte ^= 1);
            let next = Version::of_bytes(number as u64, data, 1 << 20).on(1, &version);
            version = Version { keep: true, ..next };
            server.publish_patch(version.clone());
            let found = update(&worker);
            assert_eq!((found.encoding, &found.digest), ("delta-1", &version.digest()), "kind {}", kind);
            match (&model, found.snapshot) {
                (Some(model), _) => assert!(model.read().get::<u8>("w").unwrap() == &version.data[..]),
                (None, snapshot) => {
                    assert!(snapshot.unwrap().get::<u8>("w").unwrap()[..] == version.data[..])
                }
            }
            let told = |p: &Publisher| p.applied.last().and_then(|a| a.patch.as_ref()).map(|p| p.version);
            server.wait("the report", |p| told(p) == Some(number as u64 - 1));
        }
        assert!(server.publisher.lock().unwrap().unpatched.is_empty());
    }
}

#[test]
fn whoever_wants_no_patches_gets_none() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let worker =
        Worker::builder(&server.address).name("w").snapshots(MODEL).patches(false).connect().unwrap();
    let version = Version { keep: true, ..Version::of_bytes(1, vec![7; 1000], 100) };
    server.publish(version.clone());
    update(&worker);
    let next = Version::of_bytes(2, [vec![8], vec![7; 999]].concat(), 100).on(1, &version);
    server.publish_patch(next);
    assert_eq!(update(&worker).encoding, "raw");
}

/// A worker whose user decides, and the events that it was told of.
fn deciding(server: &Running, build: impl FnOnce(Builder) -> Builder) -> (Worker, Arc<Mutex<Vec<Event>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let timing = Timing { ping: Duration::from_millis(50), ..Timing::default() };
    let builder = Worker::builder(&server.address).name("w").timing(timing);
    let builder = builder.on_event(move |event: &Event| told.lock().unwrap().push(event.clone()));
    (build(builder).connect().unwrap(), events)
}

fn text_of(result: Result<Option<Update>, Error>) -> String {
    match result {
        Err(Error::Rejected { code: Code::Apply, text, .. }) => text,
        other => panic!("not turned down: {:?}", other),
    }
}

#[test]
fn a_snapshot_that_is_turned_down_leaves_the_one_before() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let (worker, events) = deciding(&server, |builder| {
        builder.snapshots(MODEL).apply(|offer| match offer.snapshot.unwrap().get::<u8>("w")?[0] {
            2 => Err("not on this GPU".into()),
            3 => panic!("a bug of the user's"),
            _ => Ok(()),
        })
    });
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    assert_eq!(update(&worker).version, 1);
    for (number, words) in [(2, "not on this GPU"), (3, "panicked: a bug of the user's")] {
        server.publish(Version::of_bytes(number, vec![number as u8; 10], 4));
        assert!(text_of(worker.receive(LONG)).contains(words));
        assert_eq!(worker.snapshot(MODEL).unwrap().version, 1);
        server.wait("the report", |p| {
            p.failed
                .iter()
                .any(|f| f.version == number && f.intact && f.code == "apply" && f.text.contains(words))
        });
        let told = |event: &Event| matches!(event, Event::Rejected { version, .. } if *version == number);
        assert!(events.lock().unwrap().iter().any(told));
    }
    assert!(!server.publisher.lock().unwrap().applied.iter().any(|applied| applied.version > 1));
    server.publish(Version::of_bytes(4, vec![4; 10], 4));
    assert_eq!(update(&worker).version, 4);
}

#[test]
fn a_model_that_is_turned_down_runs_nothing_and_is_tried_three_times() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let model = bytes_model(10);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let told = asked.clone();
    let (worker, _events) = deciding(&server, |builder| {
        builder.model(MODEL, &model).apply(move |offer| {
            told.lock().unwrap().push(offer.version);
            match offer.weights.unwrap().get::<u8>("w")?[0] {
                2 => Err("no".into()),
                _ => Ok(()),
            }
        })
    });
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    update(&worker);
    server.publish(Version::of_bytes(2, vec![2; 10], 4));
    for _ in 0..3 {
        assert_eq!(text_of(worker.receive(LONG)), "no");
        assert!(worker.state().models[MODEL].torn);
        assert!(matches!(model.read().get::<u8>("w"), Err(Error::Torn)));
    }
    server.wait("the report", |p| p.failed.iter().filter(|f| f.version == 2 && !f.intact).count() >= 3);
    assert!(worker.receive(Duration::from_millis(200)).unwrap().is_none(), "rejected by now");
    assert_eq!(asked.lock().unwrap()[..], [1, 2, 2, 2]);
    server.publish(Version::of_bytes(3, vec![3; 10], 4));
    assert_eq!(update(&worker).version, 3);
    assert_eq!(model.read().get::<u8>("w").unwrap(), [3; 10]);
}

#[test]
fn a_veto_comes_before_a_byte_has_changed() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let model = bytes_model(10);
    let (worker, _events) = deciding(&server, |builder| {
        builder.model(MODEL, &model).before_apply(|offer| {
            assert!(offer.weights.is_none() && offer.layout.nbytes == 10);
            match offer.version {
                2 => Err("not now".into()),
                _ => Ok(()),
            }
        })
    });
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    update(&worker);
    server.publish(Version::of_bytes(2, vec![2; 10], 4));
    assert_eq!(text_of(worker.receive(LONG)), "not now");
    assert_eq!((model.read().version(), model.read().get::<u8>("w").unwrap()), (Some((1, 1)), &[1; 10][..]));
    server.wait("the report", |p| p.failed.iter().any(|failed| failed.version == 2 && failed.intact));
}

/// A user's function that returns when it is told to.
#[allow(clippy::type_complexity)]
fn held() -> (Sender<()>, impl Fn(&Offer) -> Result<(), Box<dyn std::error::Error>> + Send + Sync) {
    let (go, wait) = channel();
    let wait = Mutex::new(wait);
    (
        go,
        move |offer: &weightbus::Offer| {
            if offer.version == 2 {
                Ok(wait.lock().unwrap().recv_timeout(LONG)?)
            } else {
                Ok(())
            }
        },
    )
}

#[test]
fn a_function_that_hangs_is_reported_and_only_its_model_waits() {
    const LIMIT: Duration = Duration::from_millis(200);
    for in_place in [true, false] {
        let server = Running::start(1, "tcp://127.0.0.1:*");
        let model = bytes_model(10);
        let (go, hold) = held();
        let (worker, events) = deciding(&server, |builder| {
            let builder = builder.apply(hold).apply_timeout(LIMIT);
            if in_place {
                builder.model(MODEL, &model)
            } else {
                builder.snapshots(MODEL)
            }
        });
        server.publish(Version::of_bytes(1, vec![1; 10], 4));
        update(&worker);
        server.publish(Version::of_bytes(2, vec![2; 10], 4));
        thread::scope(|scope| {
            let hanging = scope.spawn(|| worker.receive(LONG));
            let told = |failed: &Failed| failed.text.contains("within 200ms") && failed.intact != in_place;
            server.wait("the report", |p| p.failed.iter().any(told));
            assert_eq!(worker.state().models[MODEL].torn, in_place);
            if in_place {
                assert!(matches!(model.read().get::<u8>("w"), Err(Error::Torn)));
            } else {
                assert_eq!(worker.snapshot(MODEL).unwrap().version, 1);
            }
            server.publish(Version::of_bytes(3, vec![3; 10], 4));
            assert!(worker.receive(LIMIT).unwrap().is_none(), "the model is not free");
            assert!(!hanging.is_finished());
            go.send(()).unwrap();
            assert!(text_of(hanging.join().unwrap()).contains("within 200ms"));
        });
        assert_eq!(update(&worker).version, 3);
        let late = |event: &Event| matches!(event, Event::Notice { code: Code::Apply, .. });
        let end = Instant::now() + LONG;
        while events.lock().unwrap().iter().filter(|event| late(event)).count() != 1 {
            assert!(Instant::now() < end, "{:?}", events.lock().unwrap());
            thread::yield_now();
        }
        assert!(!server.publisher.lock().unwrap().applied.iter().any(|applied| applied.version == 2));
    }
}

#[test]
fn a_late_function_is_reported_before_the_version_after_it() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let model = bytes_model(10);
    let (go, hold) = held();
    let limit = Duration::from_millis(450); // time for version 3 to get ready
    let (worker, _events) = deciding(&server, |b| b.model(MODEL, &model).apply(hold).apply_timeout(limit));
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    update(&worker);
    server.publish(Version::of_bytes(2, vec![2; 10], 4));
    thread::scope(|scope| {
        let hanging = scope.spawn(|| worker.receive(LONG));
        let end = Instant::now() + LONG;
        let until = |what: &str, holds: &dyn Fn(&ModelState) -> bool| {
            while !holds(&worker.state().models[MODEL]) {
                assert!(Instant::now() < end, "{}", what);
                thread::yield_now();
            }
        };
        until("it is being applied", &|state| state.ready == Some((1, 2)));
        server.publish(Version::of_bytes(3, vec![3; 10], 4));
        until("the next one is ready", &|state| state.ready == Some((1, 3)));
        until("its time is over", &|state| state.torn); // found out here, before the worker's thread looks
        go.send(()).unwrap();
        text_of(hanging.join().unwrap());
    });
    assert_eq!(update(&worker).version, 3);
    let reports = |p: &Publisher| p.applied.iter().filter(|applied| applied.version == 3).count();
    server.wait("the report", |p| reports(p) > 0);
    let told = server.publisher.lock().unwrap().failed.clone();
    assert!(told.iter().any(|failed| failed.version == 2 && !failed.intact), "{:?}", told);
    server.wait("saying so again", |p| reports(p) > 2); // nothing has torn it
}

#[test]
fn readers_wait_for_the_function_and_close_does_not() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let model = bytes_model(10);
    let ((go, hold), (begun, begins)) = (held(), channel());
    let begun = Mutex::new(begun);
    let apply = move |offer: &weightbus::Offer| {
        let _ = begun.lock().unwrap().send(offer.version);
        hold(offer)
    };
    let (worker, _events) = deciding(&server, |b| b.model(MODEL, &model).apply(apply).apply_timeout(LONG));
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    update(&worker);
    server.publish(Version::of_bytes(2, vec![2; 10], 4));
    thread::scope(|scope| {
        let applying = scope.spawn(|| worker.receive(LONG));
        while begins.recv_timeout(LONG).unwrap() != 2 {}
        worker.close();
        let reading = scope.spawn(|| model.read().version());
        go.send(()).unwrap();
        assert_eq!(applying.join().unwrap().unwrap().unwrap().version, 2);
        assert!(matches!(reading.join().unwrap(), Some((1, 1 | 2))));
    });
    assert_eq!(model.read().version(), Some((1, 2)));
}

#[test]
fn a_model_of_fewer_tensors_and_other_floats_takes_what_it_has() {
    let values: Vec<f32> = (0..10_000).map(|i| i as f32 / 7.0).collect();
    let mut data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    data.extend_from_slice(&[9; 4]);
    let json = r#"{"a":{"dtype":"F32","shape":[10000],"data_offsets":[0,40000]},"rest":{"dtype":"U8","shape":[4],"data_offsets":[40000,40004]}}"#;
    let version = Version { layout: publisher::layout(json), ..Version::of_bytes(1, data, 10_000) };
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(version.clone());
    let model = Model::new([Tensor::new("a", &[10_000], vec![BF16(0); 10_000])]).unwrap();
    let builder = Worker::builder(&server.address).name("w").model(MODEL, &model);
    let worker = builder.partial(true).cast(true).connect().unwrap();
    assert_eq!(update(&worker).digest, version.digest());
    for (cast, value) in weightbus::to_f32(model.read().get::<BF16>("a").unwrap()).iter().zip(values) {
        assert!((cast - value).abs() <= value / 256.0, "{} is not {}", cast, value);
    }
    server.wait("the report", |p| p.applied.iter().any(|a| a.digest == version.digest()));
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls until there is something, as a runtime would.
fn next(stream: &mut UpdateStream) -> Option<Result<Update, Error>> {
    let waker = Arc::new(Unpark(thread::current())).into();
    let end = Instant::now() + LONG;
    loop {
        match stream.poll_next(&mut Context::from_waker(&waker)) {
            Poll::Ready(found) => return found,
            Poll::Pending => thread::park_timeout(end.saturating_duration_since(Instant::now())),
        }
        assert!(Instant::now() < end, "nobody woke this task");
    }
}

#[test]
fn a_stream_has_version_after_version_and_an_end() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    server.publish(Version::of_bytes(1, vec![1; 10], 4));
    let model = bytes_model(10);
    let worker = Arc::new(Worker::builder(&server.address).name("w").model(MODEL, &model).connect().unwrap());
    let mut stream = worker.stream().unwrap();
    assert_eq!(next(&mut stream).unwrap().unwrap().version, 1);
    server.publish(Version::of_bytes(2, vec![2; 11], 4));
    assert!(matches!(next(&mut stream), Some(Err(Error::Rejected { code: Code::LayoutMismatch, .. }))));
    server.publish(Version::of_bytes(3, vec![3; 10], 4));
    assert_eq!(next(&mut stream).unwrap().unwrap().version, 3);
    worker.close();
    assert!(next(&mut stream).is_none());
    drop(stream);
    let end = Instant::now() + LONG;
    while Arc::strong_count(&worker) > 1 {
        assert!(Instant::now() < end, "its thread is still there");
        thread::yield_now();
    }
}

/// Polls in the thread that wakes it.
struct AtOnce(Mutex<UpdateStream>, Mutex<Sender<u64>>);

impl AtOnce {
    fn poll(self: Arc<Self>) {
        let waker = self.clone().into();
        if let Poll::Ready(Some(found)) = self.0.lock().unwrap().poll_next(&mut Context::from_waker(&waker)) {
            self.1.lock().unwrap().send(found.unwrap().version).unwrap();
        }
    }
}

impl Wake for AtOnce {
    fn wake(self: Arc<Self>) {
        self.poll();
    }
}

#[test]
fn a_stream_may_be_polled_by_who_is_woken() {
    let server = Running::start(1, "tcp://127.0.0.1:*");
    let worker = Arc::new(Worker::builder(&server.address).name("w").snapshots(MODEL).connect().unwrap());
    let (found, finds) = channel();
    let task = Arc::new(AtOnce(Mutex::new(worker.stream().unwrap()), Mutex::new(found)));
    for number in 1..=2 {
        task.clone().poll();
        server.publish(Version::of_bytes(number, vec![1; 10], 4));
        assert_eq!(finds.recv_timeout(LONG).unwrap(), number);
    }
}

#[cfg(feature = "stream")]
#[test]
fn a_stream_is_one_of_futures_core() {
    fn is_stream<S: futures_core::Stream<Item = Result<Update, Error>> + Send + Unpin + 'static>() {}
    is_stream::<UpdateStream>();
}
