"""Text and tokens: the Hugging Face tokenizer behind the `Tokenizer` interface, and the one that belongs to a model.

worker: engine's tokenizer --HuggingFaceTokenizer--> Tokenizer        tools: model --tokenizer_of--> Tokenizer (transformers alone is loaded)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mprollout.errors import ConfigError

if TYPE_CHECKING:
    from mprollout.generator import Tokenizer


class HuggingFaceTokenizer:
    """A `Tokenizer` over a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """With the special tokens that the tokenizer itself adds, unless the text continues a sequence."""
        return list(self._tokenizer.encode(text, add_special_tokens=not continues))

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        given = {"tools": list(tools) if tools else None, "add_generation_prompt": True, **template_kwargs}
        return list(self._tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **given))

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer that the workers of a run use. Blocks for as long as loading takes.

    Args:
        model: `SGLangConfig.model`; "" for the simulated generator.

    Raises:
        ConfigError: there is none; names the model and the cause.
    """
    if not model:
        from mprollout.simulated import ByteTokenizer

        return ByteTokenizer()
    try:
        return HuggingFaceTokenizer(load_tokenizer(model))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{model}: no tokenizer can be loaded: {type(error).__name__}: {error}") from error
