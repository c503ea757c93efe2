"""llama.cpp's HTTP API for front ends that speak only that."""

from typing import Any

from fastapi import FastAPI

from moepack.serving.answers import Answers

__all__ = ["add_llamacpp"]


def add_llamacpp(app: FastAPI, answers: Answers) -> None:
    """Serve llama.cpp's endpoints."""
    engine, settings = answers.engine, answers.settings

    @app.get("/props")
    async def props() -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": engine.context},
            "total_slots": engine.slots,
            "model_alias": settings.name,
            "chat_template": engine.tokenizer.chat_template or "",
        }
