"""Scenarios of versions whose chunks several publishers have, as those of sharded trainers."""

from contextlib import closing

from weightbus.tests.conformance.faults import LARGER
from weightbus.tests.conformance.proxy import Proxy
from weightbus.tests.conformance.publishing import expect
from weightbus.tests.conformance.rules import cut
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import noise
from weightbus.tests.net.split import Split


def sources(stage: Stage) -> None:
    """takes each chunk from the publisher that has it, from several at once"""
    publishers = [stage.open(), stage.open_source(), stage.open_source()]
    stage.worker()
    splits = [Split(publishers, noise(stage.chance, 3 * LARGER)) for _ in range(3)]
    for split in splits:
        stage.publish(split.weights, source=split)
    stage.worker("late").wait_applied("m", stage.publisher.epoch, len(splits))
    obtained = [split.obtained for split in splits]
    expect(not any(obtained), f"the publisher got chunks from its sources: {obtained}")


def source_dies(stage: Stage) -> None:
    """gets from its publisher what a source does not send, or all if it takes none from sources"""
    with closing(Proxy()) as proxy:
        publishers = [stage.open(), stage.open_source()]
        proxy.lead_to(publishers[1].address, publishers[1].data_address)
        stage.worker()
        for _ in range(2):
            proxy.forget()
            once = stage.which("chunk", worker="w", skip=8, most=1)
            proxy.rules = [cut(once)]
            weights = noise(stage.chance, 3 * LARGER)
            split = Split(publishers, weights, [publishers[0].address, proxy.address])
            stage.publish(weights, source=split)
            expect(split.obtained == 1, "the publisher was to get what its worker lacks")
            fetched = proxy.seen("fetch", lambda passing: passing.worker == "w")
            expect(once.count == bool(fetched), f"no connection was cut; {proxy.story()}")
