"""A Tacit classifier for transformers: an encoder, means over a text's tokens, and a linear layer.

transformers' own classifiers of these encoders read the first token through a further trained layer, which these models
do not have. Load it with `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)`. It needs
torch and transformers alone.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

__all__ = ["TacitConfig", "TacitForSequenceClassification"]


class TacitConfig(PretrainedConfig):
    """The config.

    Args:
        encoder: the encoder's own config.
        prompt_tokens: how many trained vectors stand before each text.
        first_position: the position of the first vector.
        head_layers: layers whose means, side by side, centred and of unit length, the linear layer reads; 0 is what the
            first layer reads. Empty: it reads the last layer's mean as it is.
    """

    model_type = "tacit_classifier"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        prompt_tokens: int = 0,
        first_position: int = 0,
        head_layers: list[int] | None = None,
        **more: Any,
    ) -> None:
        self.encoder = encoder or {"model_type": "bert"}
        self.prompt_tokens, self.first_position = prompt_tokens, first_position
        self.head_layers = head_layers or []
        super().__init__(**more)


class TacitForSequenceClassification(PreTrainedModel):
    """Maps ids (B, S) to logits (B, labels). Padding is never attended to and never in the mean."""

    config_class = TacitConfig

    def __init__(self, config: TacitConfig) -> None:
        super().__init__(config)
        self.encoder: Any = AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        if hasattr(self.encoder, "pooler"):
            self.encoder.pooler = None
        width = self.encoder.get_input_embeddings().embedding_dim
        self.prompt = nn.Parameter(torch.zeros(config.prompt_tokens, width)) if config.prompt_tokens else None
        read = self.encoder.config.hidden_size * max(1, len(config.head_layers))
        self.centre = nn.Parameter(torch.zeros(read), requires_grad=False) if config.head_layers else None
        self.classifier = nn.Linear(read, len(config.id2label or ()))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_: object,
    ) -> SequenceClassifierOutput:
        seen = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask.bool()
        vectors = self.encoder.get_input_embeddings()(input_ids)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        visible, ahead = seen, self.config.prompt_tokens
        if self.prompt is not None:
            vectors = torch.cat([self.prompt.expand(len(input_ids), -1, -1), vectors], dim=1)
            visible = torch.cat([seen.new_ones(len(input_ids), ahead), seen], dim=1)
            types = torch.cat([types.new_zeros(len(input_ids), ahead), types], dim=1)
        more = {"token_type_ids": types} if hasattr(self.encoder.config, "type_vocab_size") else {}
        at = torch.arange(visible.shape[1], device=input_ids.device) + self.config.first_position
        found = self.encoder(
            inputs_embeds=vectors,
            attention_mask=visible.long(),
            position_ids=at.expand(visible.shape),
            output_hidden_states=bool(self.config.head_layers),
            **more,
        )
        states = [found.hidden_states[layer] for layer in self.config.head_layers] or [found.last_hidden_state]
        read, count = torch.cat(states, dim=2)[:, ahead:], seen.sum(dim=1, keepdim=True).clamp(min=1)
        features = read.masked_fill(~seen[:, :, None], 0).sum(dim=1) / count
        if self.centre is not None:
            features = features - self.centre
            features = features / features.square().sum(dim=1, keepdim=True).clamp(min=1e-12).sqrt()
        logits = self.classifier(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
