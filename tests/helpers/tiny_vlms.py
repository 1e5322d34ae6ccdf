"""Small random vision-language models (VLMs) and their processors, built in code without files or downloads.

Each has about 50 thousand parameters, a character tokenizer and images of a few dozen pixels, so that one image is 4 to
20 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from base_fixtures import character_tokenizer
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava_next", "idefics3", "smolvlm")
"""Model types that `build` accepts."""
HYBRID = "qwen3_5"
"""Another one: a layer of linear attention (recurrent), one of full attention, and the vision tower of Qwen3-VL."""

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
)


@dataclass(slots=True)
class TinyVLM:
    """A VLM and its processor."""

    model: Any
    processor: Any


def build(name: str, seed: int = 0, **sizes: int) -> TinyVLM:
    """The small model and the processor of one of `NAMES` or of `HYBRID`; float32, on the CPU, attention "sdpa".

    `sizes` override the config of its text model.
    """
    processor = _PROCESSORS[name]()
    torch.manual_seed(seed)
    model = _MODELS[name](processor, sizes)
    # Larger than usual initial weights: in such small layers the usual ones make all images look alike.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return TinyVLM(model, processor)


def make_image(color: str = "red", size: tuple[int, int] = (32, 32), mark: str | None = None) -> Image.Image:
    """An image of one colour and `size` (width, height), with a square of colour `mark` in its upper left corner."""
    image = Image.new("RGB", size, color)
    if mark is not None:
        image.paste(Image.new("RGB", (max(1, size[0] // 2), max(1, size[1] // 2)), mark), (0, 0))
    return image


def question(text: str, images: int = 1) -> list[dict[str, Any]]:
    """A conversation of one message, image blocks first."""
    blocks = [{"type": "image"}] * images
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]


# ------------------------------------------------------------------------------------------------- processors


def chat_template(placeholder: str, *, tools: bool = True) -> str:
    """A template whose messages are `<role>content\\n`, with `placeholder` for each image, and tool calls as JSON."""
    shown = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}" if tools else ""
    calls = (
        "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>"
        "{% endfor %}{% endif %}"
        if tools
        else ""
    )
    blocks = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% if b.type == 'image' %}" + placeholder + "{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}"
    )
    ends = "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}"
    return (
        shown
        + "{% for m in messages %}<{{ m.role }}>"
        + blocks
        + calls
        + ends
        + "{% endfor %}"
        + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def _without_videos(base: type) -> type:
    """The processor class without a video processor, which needs torchvision.

    Its name stays the same, since transformers reads it.
    """

    def check(self: Any, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return base.check_argument_for_proper_class(self, argument_name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check, "__module__": base.__module__})


class _NoVideos(dict):  # type: ignore[type-arg]
    """Replaces a video processor; a dict, since it is saved as JSON."""

    model_input_names: tuple[str, ...] = ()
    merge_size = 2
    num_frames = None
    fps = None
    _auto_class = None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        pass


def _qwen_processor(base: type, patch_size: int) -> Any:
    factor = 2 * patch_size
    images = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": factor * factor, "longest_edge": 16 * factor * factor},
    )
    tokenizer = character_tokenizer(*_QWEN_TOKENS)
    template = chat_template(_QWEN_IMAGE)
    return _without_videos(base)(images, tokenizer, _NoVideos(), chat_template=template)


def _gemma3_processor() -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = character_tokenizer(*named.values(), named=named)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    template = chat_template("<start_of_image>")
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _llava_next_processor() -> Any:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )
    return transformers.LlavaNextProcessor(
        images,
        character_tokenizer("<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=chat_template("<image>"),
        num_additional_image_tokens=1,
    )


def _idefics_sizes() -> dict[str, Any]:
    return {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}


def _idefics3_processor() -> Any:
    images = Idefics3ImageProcessorPil(**_idefics_sizes())
    tokenizer = character_tokenizer(*_IDEFICS_TOKENS)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=chat_template("<image>"))


def _smolvlm_processor() -> Any:
    from transformers.models.smolvlm import processing_smolvlm

    # Only prompts with videos need the package num2words.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    images = SmolVLMImageProcessorPil(**_idefics_sizes())
    tokenizer = character_tokenizer(*_IDEFICS_TOKENS)
    made = _without_videos(processing_smolvlm.SmolVLMProcessor)
    return made(images, tokenizer, _NoVideos(), image_seq_len=4, chat_template=chat_template("<image>"))


_PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen_processor(transformers.Qwen2VLProcessor, 4),
    "qwen2_5_vl": lambda: _qwen_processor(transformers.Qwen2_5_VLProcessor, 4),
    "qwen3_vl": lambda: _qwen_processor(transformers.Qwen3VLProcessor, 4),
    HYBRID: lambda: _qwen_processor(transformers.Qwen3VLProcessor, 4),
    "gemma3": _gemma3_processor,
    "llava_next": _llava_next_processor,
    "idefics3": _idefics3_processor,
    "smolvlm": _smolvlm_processor,
}


# ----------------------------------------------------------------------------------------------------- models


def _ids(processor: Any) -> Callable[[str], int]:
    return processor.tokenizer.convert_tokens_to_ids


def _text(processor: Any, sizes: dict[str, int], **changes: Any) -> dict[str, Any]:
    return {**_TEXT, "vocab_size": len(processor.tokenizer), **changes, **sizes}


def _qwen_ids(processor: Any) -> dict[str, int]:
    number = _ids(processor)
    return {
        "image_token_id": number("<|image_pad|>"),
        "video_token_id": number("<|video_pad|>"),
        "vision_start_token_id": number("<|vision_start|>"),
        "vision_end_token_id": number("<|vision_end|>"),
        "tie_word_embeddings": False,
    }


_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
}


def _qwen2_vl(processor: Any, sizes: dict[str, int]) -> Any:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = _text(processor, sizes, rope_parameters=dict(_MROPE))
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_ids(processor))
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(processor: Any, sizes: dict[str, int]) -> Any:
    vision = {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    text = _text(processor, sizes, rope_parameters=dict(_MROPE))
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(processor))
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(processor: Any, sizes: dict[str, int]) -> Any:
    vision = {**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    rope = {**_MROPE, "mrope_interleaved": True}
    text = _text(processor, sizes, head_dim=8, rope_parameters=rope)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(processor))
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_5(processor: Any, sizes: dict[str, int]) -> Any:
    vision = {**_QWEN_VISION, "num_position_embeddings": 64}
    linear: dict[str, Any] = {f"linear_{kind}": 8 for kind in ("key_head_dim", "value_head_dim")}
    linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    rope = {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    layers = ["linear_attention", "full_attention"]
    # As `GATED_NORM_EPS` of the small hybrids; larger, since each gradient is compared by its own norm.
    linear["rms_norm_eps"] = 0.1
    text = _text(processor, sizes, head_dim=8, rope_parameters=rope, layer_types=layers, **linear)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **_qwen_ids(processor))
    return transformers.Qwen3_5ForConditionalGeneration(config)


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def _gemma3(processor: Any, sizes: dict[str, int]) -> Any:
    number = _ids(processor)
    # One layer with a sliding window, one with full attention.
    layers = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=_text(processor, sizes, head_dim=8, query_pre_attn_scalar=8, **layers),
        vision_config=dict(_VISION, vision_use_head=False),
        mm_tokens_per_image=4,
        boi_token_index=number("<start_of_image>"),
        eoi_token_index=number("<end_of_image>"),
        image_token_index=number("<image_soft_token>"),
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _llava_next(processor: Any, sizes: dict[str, int]) -> Any:
    config = transformers.LlavaNextConfig(
        text_config=transformers.LlamaConfig(**_text(processor, sizes)),
        vision_config=transformers.CLIPVisionConfig(**{**_VISION, "patch_size": 8, "projection_dim": 16}),
        image_token_index=_ids(processor)("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def _idefics(config_class: type, model_class: type, processor: Any, sizes: dict[str, int]) -> Any:
    config = config_class(
        text_config=transformers.LlamaConfig(**_text(processor, sizes)),
        vision_config=dict(_VISION),
        image_token_id=_ids(processor)("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return model_class(config)


_MODELS: dict[str, Callable[[Any, dict[str, int]], Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    HYBRID: _qwen3_5,
    "gemma3": _gemma3,
    "llava_next": _llava_next,
    "idefics3": partial(_idefics, transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration),
    "smolvlm": partial(_idefics, transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration),
}
