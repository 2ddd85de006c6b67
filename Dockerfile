# The Python trainer and worker: numpy alone, no torch. /keys is for a volume of keys: who makes them here is nobody.
FROM python:3.11.14-slim-bookworm
WORKDIR /weightbus
COPY LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY bus bus
COPY codecs codecs
COPY examples/demo examples/demo
COPY python_client python_client
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[cli,keys]' \
 && install -d -o nobody -m 700 /keys /keys/workers /keys/relays
COPY examples examples
RUN ln -s /weightbus/examples/pulse /usr/local/bin/pulse
USER nobody
ENTRYPOINT ["pulse", "run", "python3"]
