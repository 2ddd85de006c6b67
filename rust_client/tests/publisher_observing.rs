//! Those who look on at a publisher's machine: what they are told is what is, whatever is lost on the way, in pages that
//! fit, at a bounded rate.

#[path = "publisher/dice.rs"]
mod dice;

use dice::Dice;
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use weightbus::limits::{Timing, HEADER_BYTES_MAX};
use weightbus::messages::FromPublisher;
use weightbus::publisher::content::Copier;
use weightbus::publisher::effects::{Effect, WorkerEvent};
use weightbus::publisher::grants::{Grant, Role};
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::{Dtype, TensorView, WorkerState};

const MODEL: &str = "m";
const EPOCH: u64 = 7;
const BURST: u64 = 16_384; // rows to all observers together, and so many a second after that
const A_SECOND: u64 = 4096;

/// A publisher's machine, whose events its observers are told of, as by its thread.
struct Bench {
    machine: PublisherMachine,
    now: Duration,
    calls: u64,
}

impl Bench {
    fn new(workers: &[&str]) -> Bench {
        let machine = PublisherMachine::new(EPOCH, "tcp://*:1", Timing::default(), None, None);
        let mut bench = Bench { machine, now: Duration::from_secs(1), calls: 0 };
        workers.iter().for_each(|name| bench.hello(name));
        bench
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
    }

    /// Does what a publisher's thread does with events; returns those.
    fn note(&mut self, effects: Vec<Effect>) -> Vec<WorkerEvent> {
        let event = |effect| if let Effect::Notify(event) = effect { Some(event) } else { None };
        let events: Vec<_> = effects.into_iter().filter_map(event).collect();
        events.iter().for_each(|event| self.machine.record_event(event, self.now));
        events
    }

    fn say(&mut self, name: &str, mut message: Value) -> Vec<WorkerEvent> {
        message["wbp"] = json!(1);
        let effects = self.machine.receive(name.as_bytes(), message.to_string().as_bytes(), 0, self.now);
        self.note(effects)
    }

    fn hello(&mut self, name: &str) {
        self.say(name, hello(name, &[MODEL]));
    }

    fn of_version(&mut self, name: &str, kind: &str, version: u64, digest: &str) {
        let epoch = self.machine.epoch();
        let said =
            json!({"type": kind, "model": MODEL, "epoch": epoch, "version": version, "digest": digest});
        self.say(name, said);
    }

    fn failed(&mut self, name: &str, version: u64, text: &str) {
        let epoch = self.machine.epoch();
        let said = json!({"type": "failed", "model": MODEL, "epoch": epoch, "version": version, "code": "apply", "text": text});
        self.say(name, said);
    }

    /// Publishes a few chunks; returns the digest.
    fn publish(&mut self, workers: &[&str]) -> String {
        self.calls += 1;
        let bytes = [self.calls as u8; 4096];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[4096], bytes: &bytes };
        let content = Arc::new(Copier::default().copy(&[tensor], 1024).unwrap());
        let digest = content.digest.clone();
        let workers = Some(workers.iter().map(|&name| name.to_owned()).collect());
        let asked = PublishTerms {
            workers: workers.filter(|names: &Vec<_>| !names.is_empty()),
            ..PublishTerms::default()
        };
        let effects = self.machine.publish(self.calls, MODEL, content, asked, self.now, self.now).unwrap();
        self.note(effects);
        digest
    }

    /// What an observer is answered: pages, or the code of a refusal; nothing if it talks too much.
    fn ask(&mut self, who: &str, epoch: u64, since: u64, pages: u64) -> Result<Vec<Value>, String> {
        let question = json!({"wbp": 1, "type": "observe", "epoch": epoch, "since": since, "pages": pages});
        let effects = self.machine.receive(who.as_bytes(), question.to_string().as_bytes(), 0, self.now);
        let answers = effects.into_iter().filter(|effect| !matches!(effect, Effect::HangUp));
        answers.map(|effect| answer(who, effect)).collect()
    }

    /// Asks until there is no more to be told.
    fn look(&mut self, view: &mut View) {
        for _ in 0..1000 {
            self.pass(200);
            let pages = self.ask("observer", view.epoch, view.since, 1).unwrap();
            pages.iter().for_each(|page| assert!(view.take(page)));
            if view.whole {
                return;
            }
        }
        panic!("it never ends");
    }

    fn truth(&self) -> BTreeMap<String, (bool, u64, u64)> {
        let row = |(name, status): (String, weightbus::WorkerStatus)| {
            let (epoch, version) = status.models[MODEL].unwrap_or((0, 0));
            (name, (status.state == WorkerState::Lost, epoch, version))
        };
        self.machine.status(self.now).into_iter().map(row).collect()
    }
}

fn hello(name: &str, models: &[&str]) -> Value {
    let models: BTreeMap<&str, Value> = models.iter().map(|&model| (model, Value::Null)).collect();
    json!({"type": "hello", "name": name, "instance": "0".repeat(32), "models": models})
}

fn answer(who: &str, effect: Effect) -> Result<Value, String> {
    match effect {
        Effect::Answer { to, header } => {
            assert_eq!(to, who.as_bytes());
            assert!(header.len() <= HEADER_BYTES_MAX);
            let page: Value = serde_json::from_slice(&header).unwrap();
            let mut whole = json!({"more": false, "follows": false, "models": [], "rows": [], "events": []});
            whole.as_object_mut().unwrap().extend(page.as_object().unwrap().clone());
            Ok(whole)
        }
        Effect::Send { message: FromPublisher::Refuse(refuse), .. } => Err(refuse.code),
        other => panic!("{:?}", other),
    }
}

/// What an observer knows, by the rules that P23 has for it.
#[derive(Default)]
struct View {
    epoch: u64,
    since: u64,
    whole: bool,
    rows: BTreeMap<String, Value>,
    models: BTreeMap<String, Value>,
}

impl View {
    /// Takes an answer; one that is late or doubled changes nothing.
    fn take(&mut self, page: &Value) -> bool {
        let number = |field: &str| page[field].as_u64().unwrap();
        if number("since") == 0 {
            *self = View { epoch: number("epoch"), ..View::default() };
        } else if (number("epoch"), number("since")) != (self.epoch, self.since) {
            return false;
        }
        self.since = number("revision");
        for event in list(page, "events").iter().filter(|event| event["kind"] == "left") {
            self.rows.remove(event["worker"].as_str().unwrap());
        }
        self.rows.extend(list(page, "rows").iter().map(|row| (text(row, "name"), row.clone())));
        self.models.extend(list(page, "models").iter().map(|row| (text(row, "name"), row.clone())));
        let told = self.rows.len() as u64 == number("workers");
        self.whole = told && page["more"] == false;
        if !told && page["more"] == false {
            self.since = 0;
        }
        true
    }

    fn shown(&self) -> BTreeMap<String, (bool, u64, u64)> {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let row = |(name, row): (&String, &Value)| {
            let doing = &row["models"][MODEL];
            (name.clone(), (row["state"] == "lost", number(&doing["epoch"]), number(&doing["version"])))
        };
        self.rows.iter().map(row).collect()
    }

    fn doing(&self, name: &str) -> &Value {
        &self.rows[name]["models"][MODEL]
    }
}

fn list<'a>(page: &'a Value, field: &str) -> &'a Vec<Value> {
    page[field].as_array().unwrap()
}

fn text(row: &Value, field: &str) -> String {
    row[field].as_str().unwrap().to_owned()
}

fn happens(bench: &mut Bench, dice: &mut Dice, digests: &mut Vec<String>) {
    let name = ["a", "b", "c", "d", "e"][dice.roll(5) as usize];
    let latest = digests.len() as u64;
    match dice.roll(8) {
        0 => digests.push(bench.publish(&[])),
        1 => bench.hello(name),
        2 => drop(bench.say(name, json!({"type": "bye"}))),
        3 => drop(bench.say(name, json!({"type": "ping", "subscribed": dice.hits(50)}))),
        4 | 5 if latest > 0 => bench.of_version(name, "applied", latest, &digests[latest as usize - 1]),
        6 => bench.failed(name, latest.max(1), "no"),
        _ => {
            bench.pass(u64::from(dice.roll(1000)));
            let effects = bench.machine.tick(bench.now);
            bench.note(effects);
        }
    }
}

#[test]
fn who_runs_a_version_is_not_at_it_whatever_it_asked_before() {
    let mut bench = Bench::new(&["a", "b"]);
    let digest = bench.publish(&[]);
    bench.of_version("a", "applied", 1, &digest);
    for (name, count) in [("a", 0), ("a", 2), ("b", 2)] {
        let version = if count == 0 { 0 } else { 1 };
        let fetch = json!({"type": "fetch", "model": MODEL, "epoch": EPOCH, "version": version, "first": 0, "count": count});
        bench.say(name, fetch);
    }
    let status = bench.machine.status(bench.now);
    assert_eq!((status["a"].doing.len(), status["b"].doing.len()), (0, 1));
}

#[test]
fn what_an_observer_is_told_is_what_is_though_answers_get_lost_doubled_and_late() {
    for seed in 0..60 {
        let (mut dice, mut bench, mut view) = (Dice(seed), Bench::new(&[]), View::default());
        let (mut late, mut digests) = (Vec::<Value>::new(), Vec::new());
        for _ in 0..40 + dice.roll(360) {
            happens(&mut bench, &mut dice, &mut digests);
            if dice.hits(30) {
                late.extend(bench.ask("observer", view.epoch, view.since, 2).unwrap());
            }
            while !late.is_empty() && dice.hits(60) {
                view.take(&late[dice.roll(late.len() as u32) as usize]);
                let kept = if dice.hits(50) { late.len().min(3) } else { 0 };
                late.drain(..late.len() - kept);
            }
            bench.pass(200);
        }
        bench.look(&mut view);
        assert_eq!(view.shown(), bench.truth(), "seed {}", seed);
    }
}

#[test]
fn nothing_is_told_twice_that_has_not_changed() {
    let (mut bench, mut view) = (Bench::new(&["a", "b"]), View::default());
    let digest = bench.publish(&[]);
    bench.of_version("a", "applied", 1, &digest);
    bench.say("a", json!({"type": "ping", "subscribed": true}));
    bench.look(&mut view);
    bench.of_version("a", "applied", 1, &digest);
    bench.say("a", json!({"type": "ping", "subscribed": true}));
    let page = &bench.ask("observer", EPOCH, view.since, 1).unwrap()[0];
    assert_eq!([list(page, "rows").len(), list(page, "models").len(), list(page, "events").len()], [0, 0, 0]);
    bench.of_version("b", "applied", 1, &digest);
    let page = &bench.ask("observer", EPOCH, view.since, 1).unwrap()[0];
    assert_eq!((list(page, "rows").len(), text(&list(page, "rows")[0], "name")), (1, "b".to_owned()));
}

#[test]
fn many_workers_are_told_in_pages_that_fit_and_at_a_bounded_rate() {
    let (mut bench, mut view) = (Bench::new(&[]), View::default());
    for number in 0..9000 {
        bench.hello(&format!("worker-{}", number));
        bench.pass(5);
    }
    let (begun, mut rows) = (bench.now, 0);
    while !view.whole {
        let pages = bench.ask("observer", view.epoch, view.since, 1).unwrap();
        let told =
            |page: &Value| ["rows", "models", "events"].iter().map(|of| list(page, of).len()).sum::<usize>();
        rows += pages.iter().map(told).sum::<usize>() as u64;
        assert!(rows <= BURST + ((bench.now - begun).as_millis() as u64 * A_SECOND) / 1000, "{} rows", rows);
        pages.iter().for_each(|page| assert!(view.take(page)));
        bench.pass(150);
    }
    assert_eq!(view.rows.len(), 9000);
    for at in 0..16 {
        bench.ask(&format!("eye {}", at % 4), 0, 0, 2).unwrap(); // who all want to know everything at once
    }
    let page = &bench.ask("observer", 0, 0, 1).unwrap()[0];
    assert_eq!((list(page, "rows").len(), &page["more"]), (0, &json!(true)), "the rest is told later");
}

#[test]
fn one_question_is_answered_by_several_pages_that_follow_one_another() {
    let (mut bench, mut view) = (Bench::new(&[]), View::default());
    for number in 0..4000 {
        let name = format!("w{}", number % 2000); // the second time nothing becomes of it, but it is touched
        let mut message = hello(&name, &[MODEL]);
        message["host"] = json!("h".repeat(250));
        bench.say(&name, message);
        bench.pass(5);
    }
    let pages = bench.ask("observer", 0, 0, 3).unwrap();
    assert_eq!(list(&pages[0], "events").len(), 64, "what was the longest ago comes first");
    let follows: Vec<&Value> = pages.iter().map(|page| &page["follows"]).collect();
    assert_eq!(follows, [true, false], "not more than two");
    assert!(pages.iter().all(|page| page["more"] == true && view.take(page)));
    bench.look(&mut view);
    assert_eq!(view.shown(), bench.truth());
}

#[test]
fn the_worst_worker_fits_a_page() {
    let (mut bench, mut view) = (Bench::new(&[]), View::default());
    let names: Vec<String> = (0..64).map(|at| format!("{:x>128}", at)).collect();
    let mut message = hello(&"w".repeat(128), &names.iter().map(String::as_str).collect::<Vec<_>>());
    (message["host"], message["client"]) = (json!("🚚".repeat(256)), json!("🚚".repeat(256)));
    bench.say("w", message);
    for (name, at) in names.iter().zip(0..) {
        let model = PublisherMachine::publish;
        let bytes = [at as u8];
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1], bytes: &bytes };
        let content = Arc::new(Copier::default().copy(&[tensor], 1).unwrap());
        model(&mut bench.machine, at, name, content, PublishTerms::default(), bench.now, bench.now).unwrap();
        let said = json!({"type": "failed", "model": name, "epoch": EPOCH, "version": 1, "code": "c".repeat(128), "text": "🚚\"".repeat(2048)});
        bench.say("w", said);
    }
    bench.look(&mut view);
    let row = &view.rows[&"w".repeat(128)];
    let errors = row["models"].as_object().unwrap().values().map(|doing| text(doing, "error"));
    assert_eq!(errors.map(|error| error.chars().count()).collect::<Vec<_>>(), [64; 64]);
}

#[test]
fn errors_are_told_whole_where_they_fit_and_without_control_characters() {
    let (mut bench, mut view) = (Bench::new(&["a"]), View::default());
    bench.publish(&[]);
    bench.failed("a", 1, &("x\u{1b}[2J\n\u{202e}y".to_owned() + &"z".repeat(512)));
    bench.look(&mut view);
    let wanted: String = ("apply: x [2J y".to_owned() + &"z".repeat(512)).chars().take(512).collect();
    assert_eq!((&view.doing("a")["error"], &view.doing("a")["failed"]), (&json!(wanted), &json!(1)));
    let digest = bench.publish(&[]);
    bench.of_version("a", "applied", 2, &digest);
    bench.look(&mut view);
    assert_eq!((&view.doing("a")["error"], &view.doing("a")["failed"]), (&Value::Null, &Value::Null));
}

#[test]
fn who_leaves_is_gone_and_who_left_too_long_ago_to_be_told_is_found_out() {
    let names: Vec<String> = (0..128).map(|at| format!("w{}", at)).collect();
    let mut bench = Bench::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut view = View::default();
    bench.look(&mut view);
    bench.say("w1", json!({"type": "bye"}));
    let page = &bench.ask("observer", view.epoch, view.since, 1).unwrap()[0];
    assert!(page["since"] != 0 && view.take(page) && view.whole && !view.rows.contains_key("w1"));
    for name in &names[2..] {
        bench.say(name, json!({"type": "bye"}));
    }
    view.take(&bench.ask("observer", view.epoch, view.since, 1).unwrap()[0]);
    assert!(!view.whole, "only the last events are told");
    bench.look(&mut view);
    assert_eq!(view.rows.keys().collect::<Vec<_>>(), ["w0"]);
}

#[test]
fn ages_of_versions_are_told_and_how_long_each_took() {
    let (mut bench, mut view) = (Bench::new(&["a"]), View::default());
    let digest = bench.publish(&[]);
    bench.pass(500);
    bench.of_version("a", "applied", 1, &digest);
    for _ in 0..100 {
        bench.publish(&[]);
        bench.pass(1000);
    }
    bench.say("a", json!({"type": "progress", "model": MODEL, "epoch": EPOCH, "version": 101, "chunks": 1}));
    bench.pass(30);
    let page = &bench.ask("observer", 0, 0, 1).unwrap()[0];
    view.take(page);
    let model = &view.models[MODEL];
    assert_eq!(
        (&model["version"], &model["nbytes"], &model["encoding"]),
        (&json!(101), &json!(4096), &json!("raw"))
    );
    let ages = list(model, "published")
        .iter()
        .map(|its| (its["version"].as_u64().unwrap(), its["age_ms"].as_u64().unwrap()));
    let ages: Vec<_> = ages.collect();
    assert_eq!(ages[..4], [(101, 1030), (100, 2030), (99, 3030), (98, 4030)]);
    assert!(ages.len() <= 24 && ages.iter().all(|&(version, age)| age == 1030 + 1000 * (101 - version)));
    let doing = json!({"epoch": EPOCH, "version": 1, "newest": 101, "took_us": 500_000, "incoming": 101,
        "phase": "receiving", "chunks": 1, "count": 4, "idle_ms": 30});
    assert_eq!(*view.doing("a"), doing);
}

#[test]
fn those_who_look_on_see_what_is_meant_for_some() {
    let (mut bench, mut view) = (Bench::new(&["a", "b"]), View::default());
    bench.publish(&[]);
    bench.look(&mut view);
    bench.publish(&["a"]);
    bench.look(&mut view);
    assert_eq!((&view.doing("a")["newest"], &view.doing("b")["newest"]), (&json!(2), &json!(1)));
    assert_eq!(view.models[MODEL]["version"], 1, "what all get");
    bench.publish(&[]);
    bench.look(&mut view);
    assert_eq!(view.doing("a")["newest"], 3, "its own is no longer the newest");
}

#[test]
fn events_are_told_and_the_time_of_day() {
    let mut bench = Bench::new(&["a"]);
    bench.machine = bench.machine.clock(Box::new(|| 1_795_253_000_123));
    bench.pass(250);
    let page = &bench.ask("observer", 0, 0, 1).unwrap()[0];
    let event = json!([{"kind": "joined", "worker": "a", "text": "worker a joined", "age_ms": 250}]);
    assert_eq!((&page["events"], &page["time_ms"]), (&event, &json!(1_795_253_000_123u64)));
    let row = json!({"name": "a", "state": "live", "road": "pulled", "heard_ms": 250, "models": {MODEL: {}}});
    assert_eq!(page["rows"], json!([row]));
    bench.say("a", json!({"type": "ping", "subscribed": true}));
    bench.pass(6000);
    let effects = bench.machine.tick(bench.now);
    bench.note(effects);
    let page = &bench.ask("observer", EPOCH, 2, 1).unwrap()[0];
    assert_eq!((&page["rows"][0]["state"], &page["events"][0]["kind"]), (&json!("lost"), &json!("lost")));
}

#[test]
fn observers_are_bounded_and_forgotten_and_are_no_workers() {
    let mut bench = Bench::new(&["a"]);
    for at in 0..16 {
        assert!(bench.ask(&format!("eye {}", at), 0, 0, 1).is_ok());
    }
    assert_eq!(bench.ask("one more", 0, 0, 1), Err("limit".to_owned()));
    assert!(bench.ask("eye 0", 0, 0, 1).is_ok());
    bench.pass(2_999);
    bench.hello("a");
    assert_eq!(bench.ask("one more", 0, 0, 1), Err("limit".to_owned()));
    bench.pass(1);
    assert!(bench.ask("one more", 0, 0, 1).is_ok());
    assert_eq!(bench.truth().into_keys().collect::<Vec<_>>(), ["a"]);
    assert!(bench.ask("a", 0, 0, 1).is_ok(), "a worker may look on, too");
}

#[test]
fn who_asks_too_often_is_answered_no_more() {
    let mut bench = Bench::new(&[]);
    let answered = (0..100).filter(|_| !bench.ask("eye", 0, 0, 1).unwrap().is_empty()).count();
    assert_eq!(answered, 16);
    bench.pass(1000);
    let answered = (0..100).filter(|_| !bench.ask("eye", 0, 0, 1).unwrap().is_empty()).count();
    assert_eq!(answered, 8, "a second later");
}

#[test]
fn a_revision_that_there_was_not_is_answered_from_the_beginning() {
    let mut bench = Bench::new(&["a"]);
    for (epoch, since) in [(EPOCH, 1 << 50), (EPOCH - 1, 1)] {
        let page = &bench.ask("observer", epoch, since, 1).unwrap()[0];
        assert_eq!((&page["since"], list(page, "rows").len()), (&json!(0), 1));
    }
}

#[test]
fn with_keys_only_an_observers_looks_on() {
    let row = |name: &str, role| (name.to_owned(), Grant { name: name.to_owned(), role });
    let by_key = [row("w", Role::Worker), row("eye", Role::Observer)].into_iter().collect();
    let mut bench = Bench::new(&[]);
    bench.machine = bench.machine.trust(by_key, "12".repeat(32));
    let question = br#"{"wbp":1,"type":"observe"}"#;
    let mut said = |key: &str| {
        let effects = bench.machine.receive_of(key.as_bytes(), key, question, 0, bench.now);
        effects.into_iter().map(|effect| answer(key, effect)).collect::<Vec<_>>()
    };
    assert_eq!(said("w"), [Err("not-allowed".to_owned())]);
    assert_eq!(said("stranger"), [Err("revoked".to_owned())]);
    assert!(said("eye")[0].is_ok());
}

/// A worker that comes again under its name, with less, is told anew; one that took its place, too.
#[test]
fn who_comes_again_is_told_as_it_is_now() {
    let (mut bench, mut view) = (Bench::new(&["a", "b"]), View::default());
    let digest = bench.publish(&[]);
    bench.of_version("a", "applied", 1, &digest);
    bench.look(&mut view);
    bench.hello("a");
    bench.look(&mut view);
    assert_eq!(view.shown(), bench.truth());
    bench.say("b", hello("c", &[MODEL]));
    bench.look(&mut view);
    assert_eq!(view.rows.keys().cloned().collect::<BTreeSet<_>>(), ["a", "c"].map(str::to_owned).into());
}
