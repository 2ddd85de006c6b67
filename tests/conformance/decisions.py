"""Scenarios of versions that are staged first, applied together, or meant for some."""

from collections.abc import Callable

from weightbus.tests.conformance.publishing import SMALL, expect
from weightbus.tests.conformance.rules import Passing, change, lose
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import noise, spec


def of(worker: str) -> Callable[[Passing], bool]:
    """Return what tells the messages of one worker's connection."""
    return lambda passing: passing.worker == worker


def heard_twice_more(stage: Stage, worker: str) -> None:
    """Wait until a worker has pinged twice more: what was sent to it before has had its effect."""

    count = len(stage.proxy.seen("ping", of(worker)))
    stage.proxy.wait_seen("ping", of(worker), count=count + 2)


def targeted(stage: Stage) -> None:
    """takes what is meant for it alone, and not what is meant for another"""
    stage.open()
    one, other = stage.worker("one"), stage.worker("other")
    stage.publish(noise(stage.chance, SMALL))
    receipt = stage.publish(noise(stage.chance, SMALL), workers=["one"])
    expect(list(receipt.workers) == ["one"], f"for one alone, but: {receipt}")
    one.wait_applied("m", stage.publisher.epoch, 2)
    heard_twice_more(stage, "other")
    late = stage.worker("late")
    late.wait_applied("m", stage.publisher.epoch, 1)
    for worker in (other, late):
        expect(not worker.those("applied", version=2), f"{worker.name} took what was for another")
    stage.publish(noise(stage.chance, SMALL))


def staged_first(stage: Stage) -> None:
    """says staged where that is asked for, with the digest"""
    stage.open()
    stage.worker()
    receipt = stage.publish(noise(stage.chance, SMALL), wait="staged")
    digest = receipt.digest
    stage.proxy.wait_seen("staged", lambda p: p.header["digest"] == digest)
    stage.publish(noise(stage.chance, SMALL))


def together_committed(stage: Stage) -> None:
    """applies together: nobody before all have staged; a late worker gets it, too"""
    stage.open()
    workers = [stage.worker("a"), stage.worker("b")]
    stage.publish(noise(stage.chance, SMALL))
    stage.proxy.rules = [lose(stage.which("staged", worker="b"))]
    stage.submit(noise(stage.chance, SMALL), commit="together")
    for name in ("a", "b"):  # each says it again and again
        stage.proxy.wait_seen("staged", of(name), count=3)
    for worker in workers:
        expect(not worker.those("applied", version=2), f"{worker.name} applied before the commit")
    stage.proxy.rules = []
    stage.settle()
    stage.worker("late").wait_applied("m", stage.publisher.epoch, 2)
    stage.publish(noise(stage.chance, SMALL))


def commit_of_another_digest(stage: Stage) -> None:
    """ignores a commit with another digest"""
    stage.open()
    worker = stage.worker()
    stage.proxy.rules = [change(stage.which("commit"), digest="0" * 64)]
    stage.submit(noise(stage.chance, SMALL), commit="together")
    stage.proxy.wait_seen("commit", count=3)
    heard_twice_more(stage, "w")
    expect(not worker.those("applied"), "a commit of other bytes was followed")
    stage.proxy.rules = []
    stage.settle()
    worker.wait_applied("m", stage.publisher.epoch, 1)


def commits_lost(stage: Stage) -> None:
    """commits in the end where commits are lost"""
    stage.open()
    workers = [stage.worker("a"), stage.worker("b")]
    stage.proxy.rules = [lose(stage.which("commit", most=5))]
    stage.publish(noise(stage.chance, SMALL), commit="together")
    for worker in workers:
        worker.wait_applied("m", stage.publisher.epoch, 1)


def together_not_announced(stage: Stage) -> None:
    """stages a version of which nothing arrived on the data channel, once it is announced again"""
    stage.open()
    worker = stage.worker()
    stage.publish(noise(stage.chance, SMALL))
    of_second: Callable[[Passing], bool] = lambda p: p.header.get("version") == 2  # noqa: E731
    stage.proxy.rules = [lose(stage.which(channel="data", when=of_second))]
    stage.publish(noise(stage.chance, SMALL), commit="together")
    worker.wait_applied("m", stage.publisher.epoch, 2)


def published_as_one(stage: Stage) -> None:
    """runs versions of two models that are published as one at once, though a commit is lost"""
    policy, critic = "policy", "critic.v2"
    stage.open()
    both, one = stage.worker("both", models=(policy, critic)), stage.worker("one", models=(policy,))
    lost = stage.which("commit", worker="both", when=lambda p: p.header["model"] == critic)
    for rules in ([], [lose(lost)]):
        stage.settle()
        stage.proxy.rules = rules
        models = {policy: noise(stage.chance, SMALL), critic: noise(stage.chance, SMALL)}
        stage.submit_as_one(models)
    one.wait_applied(policy, stage.publisher.epoch, 2)  # it does not want the other
    heard_twice_more(stage, "both")
    for model in models:
        expect(not both.those("applied", model=model, version=2), f"{model} runs without the other")
    stage.proxy.rules = []
    receipts = stage.settle()
    details = {r.model: {n: w.detail for n, w in r.workers.items() if w.detail} for r in receipts}
    expect(not any(details.values()), f"it does not apply them at once: {details}")
    for model in models:
        both.wait_applied(model, stage.publisher.epoch, 2)


def together_aborted(stage: Stage) -> None:
    """applies nothing of what is aborted, even if the abort is lost at first"""
    mine = spec(w=("F32", [4, 3]))
    stage.open()
    stage.may_fail = {"layout-mismatch"}
    able, unable = stage.worker("able"), stage.worker("unable", in_place={"m": mine})
    lost = lose(stage.which("abort", worker="able", most=2))
    stage.proxy.rules = [lose(stage.which("failed", worker="unable")), lost]
    stage.aborts = True
    stage.submit(noise(stage.chance, SMALL), commit="together")
    stage.proxy.wait_seen("staged", of("able"))
    stage.proxy.rules = [lost]
    receipt = stage.settle()[-1]
    stage.aborts = False
    expect(receipt.in_state("failed") == ["unable"], f"one cannot take it, but: {receipt}")
    stage.proxy.wait_seen("abort", of("able"), count=3)
    heard_twice_more(stage, "able")
    before = len(stage.proxy.seen("staged"))
    heard_twice_more(stage, "able")
    expect(len(stage.proxy.seen("staged")) == before, "what was aborted is still said to be staged")
    unable.stop()
    stage.wait_forgotten("unable")
    stage.publish(noise(stage.chance, SMALL), commit="together")
    able.wait_applied("m", stage.publisher.epoch, 2)


def together_superseded(stage: Stage) -> None:
    """drops what waits for its commit when a newer version is published"""
    stage.open()
    workers = [stage.worker("a"), stage.worker("b")]
    stage.proxy.rules = [lose(stage.which("staged", worker="b"))]
    undecided = stage.submit(noise(stage.chance, SMALL), commit="together")
    stage.proxy.wait_seen("staged", of("a"))
    stage.submit(noise(stage.chance, SMALL))
    expect(undecided.exception(30.0) is not None, "what was superseded counts as achieved")
    stage.settle()
    for worker in workers:
        worker.wait_applied("m", stage.publisher.epoch, 2)
        expect(not worker.those("applied", version=1), "what was aborted was applied")
