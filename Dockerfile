# The Python trainer and worker: numpy alone, no torch.
FROM python:3.11-slim
WORKDIR /weightbus
COPY LICENSE README.md __init__.py __main__.py constraints.txt py.typed pyproject.toml ./
COPY bus bus
COPY codecs codecs
COPY python_client python_client
RUN pip install --no-cache-dir -c constraints.txt .
COPY examples examples
RUN ln -s /weightbus/examples/pulse /usr/local/bin/pulse
USER nobody
ENTRYPOINT ["pulse", "run", "python3"]
