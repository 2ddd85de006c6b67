//! What happens to a worker on a publisher's roster, and for how long calls wait for it then: the events that move it
//! along the protocol's tables.

use std::sync::Arc;
use std::time::Duration;
use weightbus::limits::Timing;
use weightbus::messages::{encode, Applied, FromPublisher, FromWorker, Hello, Progress, ProgressPhase};
use weightbus::publisher::content::Copier;
use weightbus::publisher::effects::Effect;
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::WorkerState;

const NOW: Duration = Duration::from_secs(10);

fn token() -> String {
    "ab".repeat(16)
}

fn later(millis: u64) -> Duration {
    NOW + Duration::from_millis(millis)
}

/// What an instance of the worker says first.
fn hello(instance: &str) -> Vec<u8> {
    encode(&FromWorker::Hello(Hello {
        name: "w".to_owned(),
        instance: instance.repeat(32),
        models: Some(("m".to_owned(), None)).into_iter().collect(),
        features: vec!["upstream".to_owned()],
        ..Default::default()
    }))
}

fn ping() -> Vec<u8> {
    encode(&FromWorker::Ping(Default::default()))
}

/// A publisher with the worker, on the connection `1`.
fn publisher() -> PublisherMachine {
    publisher_with(Timing::default())
}

fn publisher_with(timing: Timing) -> PublisherMachine {
    let mut publisher = PublisherMachine::new(7, "tcp://*:1", timing, None, Some(Box::new(|| Some(token()))));
    assert!(welcomed(&publisher.receive(b"1", &hello("0"), 0, NOW), b"1"));
    publisher
}

fn welcomed(effects: &[Effect], who: &[u8]) -> bool {
    let welcome =
        |e: &Effect| matches!(e, Effect::Send { to, message: FromPublisher::Welcome(_), .. } if to == who);
    effects.iter().any(welcome)
}

#[test]
fn who_is_away_is_back_by_what_it_says_on_the_control_channel_alone() {
    let nothing: fn(&mut PublisherMachine) = |_| {};
    let pings: fn(&mut PublisherMachine) = |publisher| drop(publisher.receive(b"1", &ping(), 0, later(1000)));
    let dials: fn(&mut PublisherMachine) =
        |publisher| drop(publisher.receive(b"2", &hello("0"), 0, later(1000)));
    let applied: fn(&mut PublisherMachine) = |publisher| {
        let said = FromWorker::Applied(Applied {
            model: "m".to_owned(),
            epoch: 7,
            version: 1,
            ..Default::default()
        });
        assert!(publisher
            .receive_report(&[token().as_bytes(), &encode(&said)].concat(), later(1000))
            .is_some());
    };
    let cases = [
        (nothing, WorkerState::Lost),
        (pings, WorkerState::Live),
        (dials, WorkerState::Live),
        (applied, WorkerState::Lost), // it may have been said before
    ];
    for (number, (says, state)) in cases.iter().enumerate() {
        let mut publisher = publisher();
        publisher.unreachable(b"1", NOW);
        says(&mut publisher);
        publisher.tick(later(1990));
        assert_eq!(
            publisher.status(later(1990))["w"].state,
            WorkerState::Live,
            "case {}: it is waited for",
            number
        );
        publisher.tick(later(2000));
        assert_eq!(publisher.status(later(2000))["w"].state, *state, "case {}", number);
    }
}

#[test]
fn a_worker_is_lost_or_stuck_after_times_of_their_own() {
    let times = Timing {
        gone_after: Duration::from_millis(700),
        stuck_after: Duration::from_millis(900),
        ..Timing::default()
    };
    let mut away = publisher_with(times);
    away.unreachable(b"1", NOW);
    let mut idle = publisher_with(times);
    let content = Arc::new(Copier::default().copy(&[], 1).unwrap());
    idle.publish(1, "m", content, PublishTerms::default(), NOW, NOW).unwrap();
    let staged = Progress {
        model: "m".to_owned(),
        epoch: 7,
        version: 1,
        phase: ProgressPhase::Staged,
        ..Default::default()
    };
    idle.receive(b"1", &encode(&FromWorker::Progress(staged)), 0, NOW);
    for (publisher, after, state) in
        [(&mut away, 700, WorkerState::Lost), (&mut idle, 900, WorkerState::Stuck)]
    {
        publisher.tick(later(after - 10));
        assert_eq!(publisher.status(later(after - 10))["w"].state, WorkerState::Live);
        publisher.tick(later(after));
        assert_eq!(publisher.status(later(after))["w"].state, state);
    }
}

#[test]
fn a_name_is_free_once_another_asks_for_it_and_its_owner_is_away() {
    let mut closed_first = publisher();
    closed_first.unreachable(b"1", NOW);
    assert!(welcomed(&closed_first.receive(b"2", &hello("1"), 0, NOW), b"2"));
    let mut asked_first = publisher();
    assert!(!welcomed(&asked_first.receive(b"2", &hello("1"), 0, NOW), b"2"));
    asked_first.unreachable(b"1", NOW);
    assert_eq!(asked_first.status(NOW)["w"].state, WorkerState::Lost);
    assert!(welcomed(&asked_first.receive(b"2", &hello("1"), 0, NOW), b"2"));
}

#[test]
fn a_call_waits_for_who_falls_silent_or_is_gone_for_as_long_as_it_says() {
    for (closed, lost_at, grace) in [(false, 5000, 3000), (true, 2000, 1000)] {
        let mut publisher = publisher();
        let (grace_of_silent, grace_of_gone) = (Duration::from_secs(3), Duration::from_secs(1));
        let asked = PublishTerms { grace: grace_of_silent, grace_of_gone, ..PublishTerms::default() };
        let content = Arc::new(Copier::default().copy(&[], 1).unwrap());
        publisher.publish(1, "m", content, asked, NOW, NOW).unwrap();
        if closed {
            publisher.unreachable(b"1", NOW);
        }
        let mut over = |millis| {
            let resolved = |effect: &Effect| matches!(effect, Effect::Resolve { achieved: false, .. });
            publisher.tick(later(millis)).iter().any(resolved)
        };
        assert!(!over(lost_at - 10) && !over(lost_at) && !over(lost_at + grace - 10), "closed: {}", closed);
        assert!(over(lost_at + grace), "closed: {}", closed);
    }
}
