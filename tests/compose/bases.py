"""Base images without a registry, under the names that the Dockerfiles ask for.

An engine of our own knows no registry, so what `FROM` names is made here from Debian's packages and
this host's Node. Each holds no more than the real one, lest a Dockerfile forget something that
only ours has. How packages are reached from here (mirror, certificates, registries) goes into these
images as environment, so that no Dockerfile needs to know.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from weightbus.tests.compose.engine import Engine

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
SECONDS = 600.0
CERTIFICATES = "/etc/certificates-of-the-host.pem"


def base(dockerfile: str) -> str:
    """Return what a Dockerfile builds on first; versions stand there alone."""
    return (ROOT / dockerfile).read_text().partition("\nFROM ")[2].split()[0]


DEBIAN = base("go_client/Dockerfile")
PYTHON = f"""
FROM {DEBIAN}
RUN apt-get update \\
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip \\
 && rm -r /var/lib/apt/lists /usr/lib/python3*/EXTERNALLY-MANAGED
"""
NODE = f"""
FROM {DEBIAN}
COPY node /usr/local/bin/node
COPY npm /usr/local/lib/node_modules/npm
WORKDIR /usr/local/bin
RUN ln -s ../lib/node_modules/npm/bin/npm-cli.js npm \\
 && ln -s ../lib/node_modules/npm/bin/npx-cli.js npx
WORKDIR /
"""


def make_bases(engine: Engine) -> None:
    """Make every base image that the services are built on."""
    _make_debian(engine)
    build = ("docker", "build", "--quiet", "--network=host", "--tag")
    engine.run(*build, base("Dockerfile"), "-", seconds=SECONDS, stdin=PYTHON)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(_which("node"), Path(folder) / "node")
        npm = Path(_which("npm")).resolve().parent.parent  # from npm/bin/npm-cli.js
        shutil.copytree(npm, Path(folder) / "npm", symlinks=True)
        (Path(folder) / "Dockerfile").write_text(NODE)
        engine.run(*build, base("node_client/Dockerfile"), folder, seconds=SECONDS)


def _make_debian(engine: Engine) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=apt", "--skip=check/empty"]
    command += ["--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/doc/*"]
    environment = {"PIP_ROOT_USER_ACTION": "ignore"}
    bundle = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    if Path(bundle).is_file():
        command += [f"--customize-hook=upload {bundle} {CERTIFICATES}"]
        environment |= {"PIP_CERT": CERTIFICATES, "NODE_EXTRA_CA_CERTS": CERTIFICATES}
    environment |= {"NPM_CONFIG_REGISTRY": _said("npm", "config", "get", "registry")}
    index = os.environ.get("PIP_INDEX_URL") or _said("pip", "config", "get", "global.index-url")
    environment |= {"PIP_INDEX_URL": index} if index else {}
    changes = [f"--change=ENV {name}={value}" for name, value in environment.items()]
    with tempfile.NamedTemporaryFile(suffix=".tar") as tar:
        subprocess.run([*command, SUITE, tar.name, *_sources()], timeout=SECONDS, check=True)  # noqa: S603
        engine.run("docker", "import", *changes, tar.name, DEBIAN, seconds=SECONDS)


def _sources() -> list[str]:
    """Return where this host takes Debian's packages from: the mirror, updates, security."""
    form = "--format=deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    listed = _said("apt-get", "indextargets", form, "Origin: Debian", "Created-By: Packages")
    ours = [line for line in listed.splitlines() if line.split()[2].startswith(SUITE)]
    return ours or [f"deb {MIRROR} {SUITE} main"]


def _said(*command: str) -> str:
    """Return what a command prints; nothing where it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _which(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name} on this host: install it, the Node image is made of it")
    return found
