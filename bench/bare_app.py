"""The baseline of `bench accept`: a FastAPI route that returns a constant, under the service's server
settings."""

import socket

import uvicorn
import uvloop
from fastapi import FastAPI

app = FastAPI(openapi_url=None)


@app.get("/")
async def constant() -> dict[str, str]:
    return {"status": "ok"}


async def serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve())
