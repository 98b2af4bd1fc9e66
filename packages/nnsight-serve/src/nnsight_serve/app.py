"""The app: an engine for as long as it lives, and the routes to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from nnsight_serve.accounts import Accounts
from nnsight_serve.bodies import Bodies
from nnsight_serve.edit_limits import EditLimits
from nnsight_serve.handles import Handles
from nnsight_serve.limits import Limits
from nnsight_serve.metrics import EngineMetrics, Metrics
from nnsight_serve.openai import arguments_of, openai_app
from nnsight_serve.policy import POLICIES
from nnsight_serve.pulse import Pulse
from nnsight_serve.refusals import Refused, answer
from nnsight_serve.routes import keyed_routes, open_routes
from nnsight_serve.settings import Settings
from nnsight_serve.uploads import Uploads
from nnsight_vllm_worker.async_engine import AsyncEngine


def create_app(settings: Settings) -> FastAPI:
    """A server's app. Its engine is started on the loop that runs the app, and ended with it.

    Blocks may carry no pickled values. What keeps the engine from starting is left in
    `app.state.failure`.

    Example:
        >>> uvicorn.run(create_app(Settings("openai-community/gpt2")), port=6677)
    """

    limits = Limits(settings.max_concurrent, settings.max_requests)
    bodies = Bodies(settings.max_body, settings.max_bodies)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            arguments = arguments_of(settings)
            engine = await AsyncEngine.start(
                settings.model,
                settings.engine,
                pickle=False,
                block_timeout=settings.block_timeout,
                keep_bytes=settings.keep_bytes,
                keep_seconds=settings.keep_seconds,
                policy=POLICIES[settings.policy][1],
                max_saves=settings.max_saves,
                whole=False,
            )
        except Exception as error:
            app.state.failure = error
            raise
        app.state.engine = engine
        app.state.pulse = Pulse(engine)
        metrics.registry.register(EngineMetrics(engine, app.state.pulse, limits, bodies))
        try:
            app.state.openai = await openai_app(engine, arguments)
            yield
        finally:
            app.state.pulse.stop()
            await engine.close()

    app = FastAPI(title="nnsight-serve", lifespan=lifespan)
    app.state.settings = settings
    app.state.failure = None
    app.state.limits = limits
    app.state.metrics = metrics
    app.state.bodies = bodies
    app.state.edit_limits = EditLimits(settings.max_edits, settings.edit_bytes)
    app.add_middleware(Accounts, limits=limits, bodies=bodies, metrics=metrics)
    app.state.uploads = Uploads(settings.max_uploads)
    app.state.handles = Handles(settings.keep_seconds)
    app.include_router(open_routes)
    app.include_router(keyed_routes)
    app.add_exception_handler(Refused, answer)
    return app
