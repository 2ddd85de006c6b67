//! Workers that are held against what was published, at a publisher's machine: who is asked, what differs, and why
//! nobody knows.

use serde_json::{json, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weightbus::checksum::crc32c;
use weightbus::digest::bytes_of_hex;
use weightbus::limits::{Timing, HEADER_BYTES_MAX};
use weightbus::messages::{to_publisher, FromPublisher, FromWorker, ToPublisher};
use weightbus::publisher::content::Copier;
use weightbus::publisher::effects::Effect;
use weightbus::publisher::grants::{Grant, Role};
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::publication::PublishTerms;
use weightbus::{Dtype, TensorView};

const MODEL: &str = "m";
const EPOCH: u64 = 7;
const LARGE: usize = 10 << 20; // summed in three slices

/// A publisher's machine, with workers that can be verified.
struct Bench {
    machine: PublisherMachine,
    now: Duration,
    calls: u64,
}

impl Bench {
    fn new(workers: &[&str]) -> Bench {
        let machine = PublisherMachine::new(EPOCH, "tcp://*:1", Timing::default(), None, None);
        let mut bench = Bench { machine, now: Duration::from_secs(1), calls: 0 };
        workers.iter().for_each(|name| drop(bench.hello(name, &["checking"])));
        bench
    }

    /// What goes out, by whom it is for: headers, and `code` alone of refusals.
    fn say(&mut self, who: &str, mut message: Value) -> Vec<(String, Value)> {
        message["wbp"] = json!(1);
        let effects = self.machine.receive(who.as_bytes(), message.to_string().as_bytes(), 0, self.now);
        told(effects)
    }

    fn hello(&mut self, name: &str, features: &[&str]) -> Vec<(String, Value)> {
        let instance = "0".repeat(32);
        let models = json!({ MODEL: null });
        let hello = json!({"type": "hello", "name": name, "instance": instance, "models": models, "features": features});
        self.say(name, hello)
    }

    /// Publishes these tensors of bytes, which these workers then run.
    fn publish(&mut self, tensors: &[(&str, &[u8])], workers: &[&str]) {
        self.calls += 1;
        let shapes: Vec<[u64; 1]> = tensors.iter().map(|(_, bytes)| [bytes.len() as u64]).collect();
        let view = |((name, bytes), shape)| TensorView { name, dtype: Dtype::U8, shape, bytes };
        let views: Vec<_> =
            tensors.iter().copied().zip(shapes.iter().map(|shape| &shape[..])).map(view).collect();
        let content = Arc::new(Copier::default().copy(&views, 1 << 20).unwrap());
        let digest = content.digest.clone();
        self.machine
            .publish(self.calls, MODEL, content, PublishTerms::default(), self.now, self.now)
            .unwrap();
        for name in workers {
            let version = self.calls;
            let said = json!({"type": "applied", "model": MODEL, "epoch": EPOCH, "version": version, "digest": digest});
            self.say(name, said);
        }
    }

    fn verify(&mut self, observer: &str, worker: &str) -> Vec<(String, Value)> {
        self.say(observer, json!({"type": "verify", "worker": worker, "model": MODEL}))
    }

    fn checked(&mut self, worker: &str, version: u64, sums: Value) -> Vec<(String, Value)> {
        self.say(
            worker,
            json!({"type": "checked", "model": MODEL, "epoch": EPOCH, "version": version, "sums": sums}),
        )
    }

    /// What an observer is told once everything is compared, and in how many slices.
    fn compared(&mut self) -> (Value, usize) {
        for slices in 1.. {
            assert!(self.machine.is_comparing());
            if let Some((to, answer)) = told(self.machine.compare()).pop() {
                assert_eq!(to, "eye");
                return (answer, slices);
            }
        }
        unreachable!()
    }

    /// What an observer hears of a worker with these sums.
    fn verdict(&mut self, sums: Value) -> Value {
        assert_eq!(self.verify("eye", "w")[0].1["type"], "check");
        assert_eq!(self.checked("w", self.calls, sums), []);
        self.compared().0
    }
}

fn told(effects: Vec<Effect>) -> Vec<(String, Value)> {
    let header = |effect| match effect {
        Effect::Answer { to, header } => {
            assert!(header.len() <= HEADER_BYTES_MAX);
            Some((String::from_utf8(to).unwrap(), serde_json::from_slice(&header).unwrap()))
        }
        Effect::Send { to, message: FromPublisher::Refuse(refuse), .. } => {
            Some((String::from_utf8(to).unwrap(), json!({"code": refuse.code})))
        }
        _ => None,
    };
    effects.into_iter().filter_map(header).collect()
}

fn code(answers: Vec<(String, Value)>) -> String {
    let (to, answer) = answers.into_iter().next().unwrap();
    assert_eq!(to, "eye");
    answer["code"].as_str().unwrap().to_owned()
}

#[test]
fn a_worker_is_asked_and_held_against_the_version() {
    let mut bench = Bench::new(&["w"]);
    let (b, a) = ([1, 2, 3], [4; 5]);
    bench.publish(&[("b", &b), ("a", &a), ("none", &[])], &["w"]);
    let check = json!({"wbp": 1, "type": "check", "model": MODEL, "epoch": EPOCH, "version": 1});
    assert_eq!(bench.verify("eye", "w"), [("w".to_owned(), check)]);
    bench.checked("w", 1, json!([crc32c(&a), crc32c(&b), 0]));
    let (same, _) = bench.compared();
    let wanted = json!({"wbp": 1, "type": "verified", "worker": "w", "model": MODEL, "epoch": EPOCH, "version": 1,
        "count": 3, "names": 3});
    assert_eq!(same, wanted);
    let other = bench.verdict(json!([crc32c(&a), 7, null]));
    let difference = json!([{"name": "b", "published": crc32c(&b), "runs": 7}]);
    assert_eq!(
        (&other["differing"], &other["unlike"], &other["differences"]),
        (&json!(1), &json!(1), &difference)
    );
    let less = bench.verdict(json!([crc32c(&a)]));
    assert_eq!((&less["count"], &less["names"]), (&json!(1), &json!(3)));
    bench.say("eye", json!({"type": "verify", "worker": "w", "model": MODEL, "first": 2}));
    bench.say("w", json!({"type": "checked", "model": MODEL, "epoch": EPOCH, "version": 1, "first": 2, "sums": [0, 1, 2]}));
    let (rest, _) = bench.compared();
    assert_eq!((&rest["first"], &rest["count"], rest.get("differing")), (&json!(2), &json!(1), None));
}

#[test]
fn a_large_version_is_summed_in_slices_and_once() {
    let mut bench = Bench::new(&["w"]);
    let bytes: Vec<u8> = (0..LARGE).map(|at| (at % 251) as u8).collect();
    bench.publish(&[("w", &bytes)], &["w"]);
    for slices in [3, 1] {
        bench.verify("eye", "w");
        bench.checked("w", 1, json!([crc32c(&bytes)]));
        let (verified, took) = bench.compared();
        assert_eq!((verified.get("differing"), &verified["count"], took), (None, &json!(1), slices));
    }
}

#[test]
fn a_version_that_goes_while_it_is_compared_is_told() {
    let mut bench = Bench::new(&["w"]);
    let bytes = vec![7; LARGE];
    bench.publish(&[("w", &bytes)], &["w"]);
    bench.verify("eye", "w");
    bench.checked("w", 1, json!([crc32c(&bytes)]));
    assert!(told(bench.machine.compare()).is_empty());
    bench.publish(&[("w", &bytes)], &["w"]);
    let (verified, _) = bench.compared();
    assert_eq!((&verified["code"], verified.get("count")), (&json!("gone"), None));
    assert!(!bench.machine.is_comparing());
}

#[test]
fn what_nobody_asked_for_has_no_effect() {
    let mut bench = Bench::new(&["w", "v"]);
    bench.publish(&[("w", &[1])], &["w", "v"]);
    bench.checked("w", 1, json!([1]));
    bench.verify("eye", "w");
    bench.checked("v", 1, json!([1]));
    bench.checked("w", 2, json!([1]));
    bench.say(
        "w",
        json!({"type": "checked", "model": MODEL, "epoch": EPOCH, "version": 1, "first": 1, "sums": []}),
    );
    assert!(!bench.machine.is_comparing());
    bench.checked("w", 1, json!([1]));
    bench.checked("w", 1, json!([1]));
    bench.compared();
    assert!(!bench.machine.is_comparing(), "it was asked once");
    let stranger = bench.checked("stranger", 1, json!([]));
    assert_eq!(stranger, [("stranger".to_owned(), json!({"code": "unknown-worker"}))]);
}

#[test]
fn why_a_worker_cannot_be_verified_is_said() {
    let mut bench = Bench::new(&["w"]);
    assert_eq!(code(bench.verify("eye", "nobody")), "absent");
    assert_eq!(code(bench.verify("eye", "w")), "absent", "it runs nothing");
    bench.hello("old", &[]);
    bench.publish(&[("w", &[1])], &["w", "old"]);
    assert_eq!(code(bench.verify("eye", "old")), "unsupported");
    bench.verify("eye", "w");
    let said = json!({"type": "checked", "model": MODEL, "epoch": EPOCH, "version": 1, "code": "changed", "text": "x\n\u{1b}y"});
    let (_, verified) = &bench.say("w", said)[0];
    assert_eq!((&verified["code"], &verified["text"]), (&json!("changed"), &json!("x y")));
    bench.publish(&[("w", &[2])], &[]);
    assert_eq!(code(bench.verify("eye", "w")), "gone");
    bench.now += Duration::from_secs(60);
    bench.machine.tick(bench.now);
    assert_eq!(code(bench.verify("eye", "w")), "absent", "it is lost");
}

#[test]
fn questions_are_bounded_and_end() {
    let names: Vec<String> = (0..18).map(|at| format!("w{}", at)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut bench = Bench::new(&names);
    bench.publish(&[("w", &[1])], &names);
    for (at, name) in names[..16].iter().enumerate() {
        assert_eq!(bench.verify(&format!("eye {}", at % 4), name)[0].1["type"], "check");
    }
    assert_eq!(code(bench.verify("eye", "w16")), "busy", "there are too many");
    assert_eq!(code(bench.verify("eye", "w0")), "busy", "another observer has it verified");
    assert_eq!(bench.verify("eye 0", "w0")[0].1["type"], "check", "it asks again");
    bench.now += Duration::from_millis(4999);
    names.iter().for_each(|name| drop(bench.say(name, json!({"type": "ping"}))));
    assert!(told(bench.machine.tick(bench.now)).is_empty());
    bench.now += Duration::from_millis(1);
    let answers = told(bench.machine.tick(bench.now));
    assert_eq!(answers.len(), 16);
    assert!(answers
        .iter()
        .all(|(_, answer)| answer["code"] == "silent" && answer["text"] == "it has not answered for 5 s"));
    assert_eq!(bench.verify("eye", "w0")[0].1["type"], "check");
}

#[test]
fn the_largest_answer_fits_a_header() {
    let mut bench = Bench::new(&["w"]);
    let names: Vec<String> = (0..4096).map(|at| format!("{:04}{}", at, "\u{1f69a}\"".repeat(400))).collect();
    let tensors: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &[1u8][..])).collect();
    bench.publish(&tensors, &["w"]);
    let verified = bench.verdict(json!(vec![7; 4096]));
    let told = verified["differences"].as_array().unwrap();
    assert_eq!((&verified["differing"], &verified["count"]), (&json!(4096), &json!(4096)));
    assert!(told.len() > 10 && told.len() < 64 && told[0]["name"].as_str().unwrap().chars().count() == 512);
}

#[test]
fn with_keys_only_an_observers_verifies() {
    let row = |name: &str, role| (name.to_owned(), Grant { name: name.to_owned(), role });
    let by_key = [row("w", Role::Worker), row("eye", Role::Observer)].into_iter().collect();
    let mut bench = Bench::new(&[]);
    bench.machine = bench.machine.trust(by_key, "12".repeat(32));
    let mut said = |key: &str| {
        let question = br#"{"wbp":1,"type":"verify","worker":"w","model":"m"}"#;
        told(bench.machine.receive_of(key.as_bytes(), key, question, 0, bench.now))[0].1["code"].clone()
    };
    assert_eq!((said("w"), said("eye")), (json!("not-allowed"), json!("absent")));
}

/// `checked` is taken apart as the vectors have it.
#[test]
fn the_answers_of_workers_agree_with_the_vectors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let table: Value = serde_json::from_slice(&std::fs::read(folder.join("checking.json")).unwrap()).unwrap();
    let ours = table["cases"].as_array().unwrap().iter().filter(|case| case["direction"] == "from_worker");
    let mut count = 0;
    for case in ours {
        let frames: Vec<Vec<u8>> =
            case["frames"].as_array().unwrap().iter().map(|frame| bytes(&folder, frame)).collect();
        match to_publisher(&frames[0], frames.len() - 1) {
            Ok(ToPublisher::Worker(FromWorker::Checked(said))) => {
                let found = json!({"type": "checked", "model": said.model, "epoch": said.epoch, "version": said.version,
                    "first": said.first, "sums": said.sums, "code": said.code, "text": said.text});
                assert_eq!(found, case["expect"]["ok"], "{}", case["name"]);
            }
            Ok(other) => panic!("{:?}", other),
            Err(error) => assert_eq!(case["expect"]["error"], error.code(), "{}", case["name"]),
        }
        count += 1;
    }
    assert!(count > 20, "{}", count);
}

fn bytes(folder: &Path, frame: &Value) -> Vec<u8> {
    match (frame["text"].as_str(), frame["hex"].as_str()) {
        (Some(text), _) => text.as_bytes().to_vec(),
        (_, Some(digits)) => bytes_of_hex(digits),
        _ => std::fs::read(folder.join(frame["file"].as_str().unwrap())).unwrap(),
    }
}
