"""A loss of a user's own: plain policy gradient times a factor, as a module with a METHOD."""

from __future__ import annotations

from dataclasses import dataclass

from groupgrad.objectives import Method, PolicyOptions, PolicyTerms, TokenLoss


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of this loss."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"loss_settings has factor={self.factor}, which trains nothing. Set it above 0")


def scaled(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """-factor A log pi."""
    return TokenLoss(-options.settings.factor * terms.token_advantages * terms.logprobs)


METHOD = Method(scaled, "token_mean", settings=Settings)
