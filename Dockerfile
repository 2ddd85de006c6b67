# A worker or trainer that needs numpy alone. BASE may be any image with Python 3.11 or newer and pip.
ARG BASE=python:3.11-slim
FROM ${BASE}
WORKDIR /weightbus
COPY . .
# A base that brings its own certificate bundle (a company's registry, say) names it in PIP_CERT.
ARG PIP_CERT=""
RUN PIP_BREAK_SYSTEM_PACKAGES=1 ${PIP_CERT:+env PIP_CERT="$PIP_CERT"} \
    python3 -m pip install --no-cache-dir -c constraints.txt .
ENV PYTHONUNBUFFERED=1
