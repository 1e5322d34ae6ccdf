"""Images for vLLM: encoding, and folding of placeholders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from groupgrad.integrations.vllm.media import check_prompt, decode, encode, folded, vllm_prompt

Image = pytest.importorskip("PIL.Image")

QWEN = SimpleNamespace(model_type="qwen2_vl", image_token_id=9)
GEMMA = SimpleNamespace(model_type="gemma3", image_token_index=9, boi_token_index=7, eoi_token_index=8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "1"])
def test_an_image_arrives_as_it_was(mode: str) -> None:
    image = Image.effect_noise((5, 3), 80).convert(mode)
    decoded = decode(encode(image))
    assert (decoded.mode, decoded.size, decoded.tobytes()) == (mode, (5, 3), image.tobytes())


@pytest.mark.parametrize("mode", ["CMYK", "P", "YCbCr"])
def test_an_image_of_another_mode_arrives_as_processors_see_it(mode: str) -> None:
    image = Image.effect_noise((5, 3), 80).convert("RGB").convert(mode)
    assert decode(encode(image)).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("text", ["", "not base64!", "aGVsbG8="])
def test_what_is_no_image_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode(text)


@pytest.mark.parametrize(
    ("ids", "num_images", "expected"),
    [
        ([1, 9, 9, 9, 2], 1, [1, 9, 2]),
        ([1, 9, 9, 2, 9, 3], 2, [1, 9, 2, 9, 3]),
        # Placeholders that the policy has sampled come after the images, and stay.
        ([1, 9, 9, 2, 9, 9, 3], 1, [1, 9, 2, 9, 9, 3]),
        ([9, 9], 1, [9]),
        # Two images side by side.
        ([1, 9, 9, 9, 9, 2], 2, [1, 9, 9, 2]),
    ],
)
def test_runs_of_placeholders_become_one(ids: list[int], num_images: int, expected: list[int]) -> None:
    assert folded(ids, num_images, QWEN) == expected


class Breaks:
    """A tokenizer whose tokens 21, 22, ... are 1, 2, ... line breaks."""

    unk_token_id = 0

    def convert_tokens_to_ids(self, text: str) -> int:
        return 20 + len(text) if len(text) <= 4 else 0


@pytest.mark.parametrize(
    ("ids", "num_images", "expected"),
    [
        ([1, 22, 7, 9, 9, 8, 22, 2], 1, [1, 7, 2]),
        # The text's own line breaks are merged into the same tokens.
        ([1, 23, 7, 9, 9, 8, 24, 2], 1, [1, 21, 7, 22, 2]),
        # Two images side by side share a token of four.
        ([1, 22, 7, 9, 9, 8, 24, 7, 9, 9, 8, 22], 2, [1, 7, 7]),
        # Without the processor's line breaks on both sides none are removed.
        ([1, 21, 7, 9, 8, 22, 2], 1, [1, 21, 7, 22, 2]),
        ([7, 9, 8], 1, [7]),
    ],
)
def test_what_gemma_puts_around_an_image_is_folded_too(ids: list[int], num_images: int, expected: list[int]) -> None:
    assert folded(ids, num_images, GEMMA, Breaks()) == expected


class Tiles:
    """A tokenizer with the tokens around tiles."""

    unk_token_id = 0

    def convert_tokens_to_ids(self, text: str) -> int:
        return {"<fake_token_around_image>": 31, "<global-img>": 32}.get(text, 0)


@pytest.mark.parametrize(
    ("ids", "num_images", "expected"),
    [
        ([1, 31, 32, 9, 9, 31, 2], 1, [1, 9, 2]),
        # Two tiles (33, 34 are positions, 5 a line break), then the whole image; then an image that was not cut.
        ([1, 31, 33, 9, 9, 31, 34, 9, 9, 5, 31, 32, 9, 9, 31, 31, 32, 9, 9, 31, 2], 2, [1, 9, 9, 2]),
        ([31, 32, 9, 31, 31, 32, 9, 31, 2, 31, 32, 9, 31], 3, [9, 9, 2, 9]),
        # Tokens sampled after the images stay.
        ([31, 32, 9, 31, 2, 31, 32, 9, 31], 1, [9, 2, 31, 32, 9, 31]),
    ],
)
def test_tiles_of_an_image_are_folded(ids: list[int], num_images: int, expected: list[int]) -> None:
    config = SimpleNamespace(model_type="idefics3", image_token_id=9)
    assert folded(ids, num_images, config, Tiles()) == expected


def test_images_without_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 3 images, but only 2 runs of their placeholder .token 9. among its 5"):
        folded([1, 9, 9, 3, 9], 3, QWEN)
    with pytest.raises(ValueError, match="has 1 images, but only 0 runs"):
        folded([1, 2], 1, QWEN)
    with pytest.raises(ValueError, match="qwen3 names no token for images"):
        folded([1, 9, 9], 1, SimpleNamespace(model_type="qwen3"))


def test_a_prompt_without_images_is_its_ids() -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=QWEN))
    assert vllm_prompt((1, 9, 9), (), engine) == {"prompt_token_ids": [1, 9, 9]}
    assert vllm_prompt([1, 9, 9], ["picture"], engine) == {
        "prompt_token_ids": [1, 9],
        "multi_modal_data": {"image": ["picture"]},
    }


def test_other_ids_than_those_trained_on_are_an_error() -> None:
    check_prompt([1, 2], [1, 2])
    check_prompt([1, 2], None)
    with pytest.raises(ValueError, match="4 tokens instead of 3, different from token 2 on"):
        check_prompt([1, 9, 2], [1, 9, 9, 2])
    with pytest.raises(ValueError, match="2 tokens instead of 3, different from token 2 on"):
        check_prompt([1, 9, 2], (1, 9))
