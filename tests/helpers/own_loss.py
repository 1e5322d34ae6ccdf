"""A loss of a user's own: plain policy gradient times a factor, as a module with a METHOD."""

from __future__ import annotations

from dataclasses import dataclass

from groupgrad.objectives import MORE_THAN_0, Method, PolicyOptions, PolicyTerms, TokenLoss, setting


@dataclass(slots=True, frozen=True)
class Settings:
    """Settings of this loss."""

    factor: float = setting(1.0, MORE_THAN_0, "trains nothing")


def scaled(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """-factor A log pi."""
    return TokenLoss(-options.settings.factor * terms.token_advantages * terms.logprobs)


METHOD = Method(scaled, "token_mean", settings=Settings)
