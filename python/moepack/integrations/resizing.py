"""`resize_token_embeddings` of a model with a packed embedding or head, whose rows cannot change."""

import weakref
from typing import Any

from moepack.errors import UnsupportedModelError

__all__ = ["Resizer"]


class Resizer:
    """Implements `resize_token_embeddings`: accepts the size that the model has.

    It is pickled and copied with its model.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Resizer":
        model = self._model()
        return type(self)(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model(),)

    def __call__(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any) -> Any:
        """Return the embedding.

        Args:
            new_num_tokens: tokens of the vocabulary; None for the present number.
            pad_to_multiple_of: round this number up to a multiple.
            **_: how transformers initializes new rows.

        Raises:
            UnsupportedModelError: the number would change.
            ReferenceError: the model was freed.
        """
        model: Any = self._model()
        if model is None:
            raise ReferenceError("the model was freed")
        embedding = model.get_input_embeddings()
        rows = embedding.num_embeddings
        wanted = rows if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if wanted != rows:
            head = "" if getattr(model.config, "tie_word_embeddings", False) else ",lm_head=16"
            raise UnsupportedModelError(
                f"a packed embedding of {rows} tokens cannot have {wanted}; add tokens to the original model and pack "
                f"it again, or keep its vocabulary unpacked with --bits 'embed_tokens=16{head}'"
            )
        return embedding
