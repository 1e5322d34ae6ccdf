"""Loads the policy and its tokenizer, checks that they are usable and fit together, and changes the loaded model."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, find_adapter_config_file

from groupgrad import compat
from groupgrad.errors import UnavailableError
from groupgrad.models.adapters import is_adapted, load_adapter
from groupgrad.models.model_names import check_gguf_file, check_model_name
from groupgrad.models.quantized import is_packed, is_quantized, make_trainable_on_cpu
from groupgrad.models.shards import local_part
from groupgrad.models.unwrapping import is_multimodal, unwrap

logger = logging.getLogger(__name__)

_DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_policy(
    model_id: str,
    init_kwargs: dict[str, Any],
    *,
    trust_remote_code: bool,
    quantization_config: Any,
    on_device: bool,
) -> nn.Module:
    """Loads the model of an id or directory in the class that its config names, in float32 unless `dtype` is given.

    The id or directory of an adapter loads its base model with the adapter on it, ready for further training. With
    `on_device` it is loaded onto this process's GPU, if there is one, unless `init_kwargs` has a `device_map`.

    ValueError for a name that leads nowhere, an unknown dtype, two quantization configs, or an adapter that does not
    fit.
    """
    check_model_name("model", model_id)
    check_gguf_file("model", model_id, init_kwargs.get("gguf_file"))
    base_id = _adapter_base_id(model_id, init_kwargs)
    if base_id is not None:
        base = load_policy(
            base_id,
            {name: value for name, value in init_kwargs.items() if name != "revision"},
            trust_remote_code=trust_remote_code,
            quantization_config=quantization_config,
            on_device=on_device,
        )
        return load_adapter(base, model_id, revision=init_kwargs.get("revision"))
    kwargs = dict(init_kwargs)
    kwargs["dtype"] = _dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", "float32")))
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError("quantization_config is given both as an argument and in model_init_kwargs; give it once")
        kwargs["quantization_config"] = quantization_config
    if kwargs.get("gguf_file") and hasattr(transformers, "GgufConfig"):
        # Later releases of transformers make a quantized model of the file unless told otherwise: it cannot be saved,
        # and weights of some architectures stay packed. Earlier ones always dequantize, and have no such argument.
        kwargs.setdefault("quantization_config", transformers.GgufConfig(dequantize=True))
    if on_device and torch.cuda.is_available():
        kwargs.setdefault("device_map", {"": torch.cuda.current_device()})
    where = {name: kwargs[name] for name in ("revision", "gguf_file") if name in kwargs}
    try:
        config = AutoConfig.from_pretrained(model_id, trust_remote_code=kwargs["trust_remote_code"], **where)
    except OSError as error:
        raise OSError(f"model={model_id!r} cannot be loaded: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnavailableError(
            f"{model_id} is an encoder-decoder ({config.model_type}); groupgrad trains decoder-only language models"
        )
    try:
        return _model_class(config).from_pretrained(model_id, **kwargs)
    except Exception as error:  # a library may raise anything for values that it did not check
        if isinstance(error, (OSError, ImportError)) or not init_kwargs:
            raise
        given = {name: value for name, value in init_kwargs.items() if name != "token"}
        raise ValueError(f"the model cannot be loaded with model_init_kwargs={given!r}: {error}") from error


def _model_class(config: Any) -> Any:
    """The class that a config names, else the automatic class for its model type."""
    name = (getattr(config, "architectures", None) or [""])[0]
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    endings = ("ForCausalLM", "ForConditionalGeneration") if takes_images else ("ForCausalLM",)
    if name.endswith(endings) and hasattr(transformers, name):
        return getattr(transformers, name)
    # Remote code names its own automatic class.
    remote = getattr(config, "auto_map", None) or {}
    is_remote = "AutoModelForImageTextToText" in remote and "AutoModelForCausalLM" not in remote
    return AutoModelForImageTextToText if takes_images or is_remote else AutoModelForCausalLM


def _adapter_base_id(model_id: str, init_kwargs: dict[str, Any]) -> str | None:
    """The base model that an adapter's config names; None if `model_id` holds no adapter."""
    file = find_adapter_config_file(model_id, revision=init_kwargs.get("revision"))
    if file is None:
        return None
    compat.require("peft", f"model={model_id!r} (an adapter)")
    base_id = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base_id or (os.path.isabs(base_id) and not os.path.isdir(base_id)):
        raise ValueError(
            f"the adapter {model_id} was trained on the base model {base_id!r}, which is not here; pass the model as "
            "PeftModel.from_pretrained(base_model, folder, is_trainable=True)"
        )
    return base_id


def load_renamed_checkpoint(model: Any, folder: str | Path) -> set[str] | None:
    """Loads the checkpoint in `folder` into `model` if its weights have other names than the model's.

    The names of weights that it lacks, or None if nothing was loaded. transformers 5 saves some models (Qwen2-VL) under
    their published weight names. `from_pretrained` maps these back, but `Trainer` does not when it resumes: it warns
    and continues with the weights in memory. This function can go when `Trainer` loads its checkpoints with
    `from_pretrained`'s name mapping.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "is_quantized", False):
        return None
    if _saved_names(Path(folder)) <= set(model.state_dict()):
        return None
    # Initialising a model draws random numbers, which must not change a seeded run.
    with torch.random.fork_rng():
        options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
        both: Any = type(model).from_pretrained(folder, config=model.config, **options)
    loaded, found = both
    model.load_state_dict(loaded.state_dict())
    return set(found["missing_keys"])


def _saved_names(folder: Path) -> set[str]:
    """Names of the weights in a checkpoint's safetensors files; empty without such a file."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        return set()
    with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt") as file:
        return set(file.keys())


def load_tokenizer(
    model: nn.Module, model_id: str, *, revision: str | None, trust_remote_code: bool, gguf_file: str | None = None
) -> Any:
    """Loads the processor of a VLM, the tokenizer of any other model. ValueError if the model id has neither.

    With `gguf_file` the tokenizer and its chat template are read from that file of the model's folder. A VLM whose
    processor cannot be loaded gets the tokenizer, with a warning that names the reason.
    """
    kwargs = {"trust_remote_code": trust_remote_code, **({"revision": revision} if revision else {})}
    if gguf_file:
        kwargs["gguf_file"] = gguf_file
    loaders = (AutoProcessor, AutoTokenizer) if is_multimodal(model) else (AutoTokenizer, AutoProcessor)
    problem: Exception | None = None
    for loader in loaders:
        try:
            loaded = loader.from_pretrained(model_id, padding_side="left", truncation_side="left", **kwargs)
        except (OSError, ValueError, ImportError) as error:
            problem = problem or error
            continue
        if not _is_empty(loaded):
            if problem is not None and loaders[0] is AutoProcessor:
                logger.warning("the processor of %r cannot be loaded: %s", model_id, problem)
            return loaded
        problem = problem or ValueError("there are no tokenizer files")
    raise ValueError(
        f"no tokenizer found for the model {model_id!r} ({type(model).__name__}): {problem}; pass one as "
        "processing_class=AutoTokenizer.from_pretrained(...)"
    ) from problem


def _is_empty(processing_class: Any) -> bool:
    """True for the tokenizer without words that transformers 5 makes of a model folder without tokenizer files."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return False
    return set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)


def inner_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer, or the tokenizer inside a processor. TypeError for anything else."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}; it must be a tokenizer "
            "(AutoTokenizer.from_pretrained) or a processor that has one"
        )
    return tokenizer


def end_of_sequence_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a completion: the tokenizer's first, then those of the model's generation config."""
    ids: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]  # pyright: ignore
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for token in configured if isinstance(configured, (list, tuple)) else [configured]:
        if token is not None and int(token) not in ids:
            ids.append(int(token))
    return ids


def max_context(model: Any) -> int | None:
    """Maximum length of prompt and completion together; None if the model's config sets no limit."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(limit) if limit else None


def check_trainable(model: nn.Module) -> None:
    """ValueError for a model without trainable parameters, or with quantized weights and no adapter."""
    # An adapter added by transformers' own `add_adapter` does not wrap the model.
    if is_quantized(model) and not is_adapted(model) and not getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"the weights of this {type(model).__name__} are quantized and cannot be trained themselves; give a "
            "peft_config (use_peft on the command line) to train an adapter over them, or load the model without "
            "quantization_config, load_in_4bit or load_in_8bit"
        )
    make_trainable_on_cpu(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"all parameters of this {type(model).__name__} are frozen (requires_grad is False), so there is nothing "
            "to train; load an adapter with PeftModel.from_pretrained(..., is_trainable=True), give a peft_config, or "
            "call model.requires_grad_(True)"
        )


def turn_off_dropout(model: nn.Module) -> None:
    """Sets the probability of every dropout layer to 0, and the dropout attributes of modules without such a layer."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def cast_head_to_float32(model: Any) -> None:
    """Computes the output head's product in float32, whatever the body computes in (arXiv:2510.13786).

    The head's weight becomes float32 too, unless it is tied to the input embedding. A tied weight keeps its type, which
    the body needs, and stays tied: the head reads it as float32 in slices, so that no second weight exists. A backward
    pass reads the slices again. ValueError if the model names no head, or if the head is no plain linear layer.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"cast_lm_head_to_fp32=True, but {type(model).__name__} names no output head; set it to False")
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"cast_lm_head_to_fp32=True, but the output head is a {type(head).__name__}, not a plain linear layer (an "
            "adapter on lm_head?); leave lm_head out of the adapter's target_modules or set it to False"
        )
    if getattr(model.get_input_embeddings(), "weight", None) is not head.weight:
        head.to(torch.float32)
    head.__class__ = Float32Linear


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, under autocast too, and whatever the type of its weight."""

    slice_rows = 16_384
    """Rows of a weight of another type that are converted at a time."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=input.device.type, enabled=False):
            if self.weight.dtype == torch.float32:
                return super().forward(input.float())
            input = input.float()
            # Random states cannot be read while a decode step is recorded as a CUDA graph.
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            products = [
                checkpoint(_float32_product, input, rows, **options) for rows in self.weight.split(self.slice_rows)
            ]
            output = torch.cat(products, dim=-1)
            return output if self.bias is None else output + self.bias.float()


def _float32_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(input, weight.float())


def _dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return value
    if value not in _DTYPES:
        raise ValueError(f"model_init_kwargs['dtype'] is {value!r}; choose one of {sorted(_DTYPES)} or a torch.dtype")
    return _DTYPES[value]


def check_language_model(model: nn.Module) -> None:
    """TypeError for a model that gives no scores of next tokens, ValueError for weights that are not finite."""
    inner: Any = unwrap(model)
    name = type(inner).__name__
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise TypeError(
            f"model is a {name}, which is no language model of transformers; load one with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if inner.get_output_embeddings() is None:
        raise TypeError(
            f"model is a {name}, which has no output head, so it gives no scores of tokens; load the policy "
            "with AutoModelForCausalLM.from_pretrained(...); classifiers go into reward_funcs"
        )
    if bad := nonfinite_weights(inner):
        raise ValueError(f"{bad}, so every score would be NaN; load a checkpoint whose weights are finite")


def nonfinite_weights(model: nn.Module, *, trained_only: bool = False) -> str | None:
    """Names the first parameter with numbers that are not finite; None if there is none.

    With `trained_only` frozen parameters are not read. Of a sharded parameter this rank's part is read.
    """
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        parameter = local_part(parameter)
        if parameter.is_meta or is_packed(parameter) or parameter.dtype.itemsize < 2:  # quantized
            continue
        # The sum needs no copy of the weights, and is finite only if all of them are. MPS has no float64.
        dtype = torch.float32 if parameter.device.type == "mps" else torch.float64
        if parameter.numel() and not bool(parameter.detach().sum(dtype=dtype).isfinite()):
            num_bad = int((~torch.isfinite(parameter)).sum())
            return f"{num_bad} of {parameter.numel()} numbers of the model's {name} are NaN or infinite"
    return None


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """ValueError if the tokenizer has tokens without a row in the model's embeddings.

    Special tokens are allowed that nothing writes, neither the chat template nor the ends and the padding of rows:
    text-only variants of models with images share the tokenizer of the others, and with it the placeholder of an image.
    """
    inner: Any = unwrap(model)
    num_rows = int(getattr(inner.get_input_embeddings(), "num_embeddings", 0))
    num_tokens = len(tokenizer)
    if not num_rows or num_tokens <= num_rows:
        return
    written = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    added, template = tokenizer.added_tokens_decoder, str(getattr(tokenizer, "chat_template", None) or "")
    beyond = [added.get(index) for index in range(num_rows, num_tokens)]
    is_unused = all(token is not None and token.special and str(token) not in template for token in beyond)
    if not is_unused or any(index is not None and index >= num_rows for index in written):
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, but the model's embeddings have {num_rows} rows, so tokens from "
            f"{num_rows} on cannot be read; give the model's own tokenizer, or call "
            f"model.resize_token_embeddings({num_tokens}) first"
        )
