"""The dashboard's queries and the alerts, with the real Prometheus: make operators.

Each query must find something in a Prometheus that scrapes a publisher.
"""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightbus import Publisher, PublishError
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_ports
from weightbus.tests.observing.test_metrics import ROOT, expressions, fetch
from weightbus.tests.operators.served import SECONDS, arrays

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def need(program: str | None) -> str:
    assert program is not None, "install Prometheus: apt-get install prometheus"
    return program


def test_the_rules_are_valid() -> None:
    words = [need(PROMTOOL), "check", "rules", str(ROOT / "docs" / "alerts.yml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_are_as_promtool_likes_them(publisher: Publisher) -> None:
    publisher.publish("m", arrays(10), require=1)
    text = fetch(publisher)
    kept = "\n".join(line for line in text.splitlines() if "_created" not in line) + "\n"
    words = [need(PROMTOOL), "check", "metrics"]
    done = subprocess.run(words, input=kept, capture_output=True, text=True, timeout=SECONDS)  # noqa: S603
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.fixture(name="prometheus")
def _prometheus(publisher: Publisher, tmp_path: Path) -> Iterator[str]:
    target = urllib.parse.urlsplit(publisher.shown.metrics).netloc
    (tmp_path / "p.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: weightbus, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    words = [need(PROMETHEUS), f"--config.file={tmp_path / 'p.yml'}"]
    words += [f"--web.listen-address={address}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stderr=log) as process:  # noqa: S603
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def ask(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """Return what a query finds; nothing while Prometheus is not there."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=5) as answer:  # noqa: S310
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []


def test_each_query_finds_something(publisher: Publisher, prometheus: str) -> None:
    def published() -> bool:
        with pytest.raises(PublishError):
            publisher.publish("m", arrays(10), timeout=5)
        publisher.publish("m", arrays(10), require=1)
        return len(ask(prometheus, "rate(weightbus_publishes_total[10s]) > 0")) == 2

    wait_for(published, "two scrapes", SECONDS)
    for expression in expressions():
        asked = expression.replace("$model", ".*").replace("$__rate_interval", "10s")
        asked = re.sub(r" > \d+$", "", asked)  # an alert's query without its threshold
        assert wait_for(lambda asked=asked: ask(prometheus, asked), asked, SECONDS), asked  # type: ignore[misc]
