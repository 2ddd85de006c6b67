"""An inference server that applies new weights between answers, never during one.

    python examples/numpy_trainer.py tcp://127.0.0.1:5555   # in one terminal
    python examples/fastapi_server.py tcp://127.0.0.1:5555 --port 8000
    curl localhost:8000/predict -H 'content-type: application/json' -d '{"x": [1, 2, 3]}'

Each answer has the version that computed it. `pip install weightbus fastapi uvicorn`.
"""

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import weightbus

PATIENCE = 5.0  # seconds that a request waits for an apply to end, or for the first version


class Question(BaseModel):
    """A request: three numbers."""

    x: list[float]


class Answer(BaseModel):
    """The prediction, and the version of the weights that computed it."""

    y: float
    epoch: int
    version: int


def app_of(address: str) -> FastAPI:
    """Return the server for the model `line` of a publisher."""
    weights = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    worker: weightbus.Subscriber

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        nonlocal worker
        async with weightbus.Subscriber(address, {"line": weights}) as worker:
            worker.start()  # new versions are applied in the background, between two answers
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(question: Question) -> Answer:
        try:
            async with worker.reading(PATIENCE, needs_version=True) as running:
                # No version is applied in this block, whatever it awaits.
                product = await asyncio.to_thread(np.dot, weights["slope"], question.x)
                y = float(product + weights["offset"])
                return Answer(y=y, epoch=running.epoch, version=running.version)
        except TimeoutError as error:  # no version has arrived, or other readers delay an apply
            raise HTTPException(503, str(error)) from error

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"version": worker.version("line")}

    return app


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="the publisher's")
    parser.add_argument("--port", type=int, default=8000, help="to serve on; 0: a free one")
    options = parser.parse_args()
    uvicorn.run(app_of(options.address), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
