"""What the chips of a deployment send each other in a step: over the fast link in a node, over the network between."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.cost.chip import GB
from paceline.cost.deployment import Deployment
from paceline.cost.efficiency import Kernels, KernelTime
from paceline.cost.operation import Operation, operation

NETWORK_FLOOR_S = 15e-6  # a message between nodes: host, card and switch both ways
NETWORK_SHARE = 0.8  # of a card's rate that a collective reaches
NUMBER_BYTES = 2.0


class Links:
    """Collectives of one deployment. Bytes are those that one chip sends."""

    def __init__(self, deployment: Deployment, kernels: Kernels) -> None:
        self.deployment = deployment
        self.kernels = kernels
        self.network = deployment.network_gbs * GB * NETWORK_SHARE

    def of_tokens(self, tokens: int, mine: int) -> Iterator[Operation]:
        """Of all layers. `mine` are the tokens of one copy of the attention."""
        deployment, model = self.deployment, self.deployment.model
        nbytes = NUMBER_BYTES * mine * model.hidden
        exchanges = deployment.dp > 1 and model.experts is not None
        reduces = model.layers if model.parallel else 2 * model.layers
        if exchanges:
            reduces -= model.moe_layers
            yield self._exchange(mine)
        if deployment.tp > 1:
            # The embedding is split over the vocabulary, so it is summed too.
            yield self._reduce("all-reduce", reduces + 1, nbytes, deployment.tp)
        if deployment.pp > 1:
            yield self._hand_on(nbytes)

    def of_rows(self, rows: int, vocab: int) -> Iterator[Operation]:
        """Logits from the chips that hold parts of the vocabulary."""
        tp = self.deployment.tp
        if tp > 1:
            # A gather moves half of what a sum of the same result does.
            yield self._reduce("gather logits", 1, NUMBER_BYTES * rows * vocab / 2.0, tp)

    def _reduce(self, name: str, calls: int, nbytes: float, chips: int) -> Operation:
        """Sum within each node, then between nodes, each chip its part."""
        per_node = min(chips, self.deployment.chips_per_node)
        nodes = -(-chips // per_node)
        seconds, known = 0.0, True
        if per_node > 1:
            inside = self.kernels.allreduce(nbytes, per_node)
            seconds, known = inside.seconds, inside.known
        if nodes > 1:
            part = nbytes / per_node
            seconds += 2 * NETWORK_FLOOR_S + 2.0 * (nodes - 1) / nodes * part / self.network
        sent = 2.0 * (chips - 1) / chips * nbytes
        return operation(name, calls, 0.0, sent, KernelTime(seconds, "link", known))

    def _exchange(self, mine: int) -> Operation:
        """Tokens to the chips of their experts and back: once to each chip, however many of its experts want it."""
        deployment, model = self.deployment, self.deployment.model
        experts = model.experts
        assert experts is not None
        groups = deployment.width
        share = -(-mine // deployment.tp)  # of its copy's tokens, each chip sends its part
        reached = groups * (1.0 - (1.0 - 1.0 / groups) ** experts.active)
        sent = share * model.hidden * NUMBER_BYTES * reached * (groups - 1) / groups
        nodes = -(-groups // deployment.chips_per_node)
        per_node = min(groups, deployment.chips_per_node)
        outside = sent * (nodes - 1) / nodes
        seconds, known = 0.0, True
        if per_node > 1:
            # The same bytes on the wire as a sum of half as much.
            inside = self.kernels.allreduce((sent - outside) / 2.0 * per_node / (per_node - 1), per_node)
            seconds, known = inside.seconds, inside.known
        if nodes > 1:
            seconds += NETWORK_FLOOR_S + outside / self.network
        return operation("all-to-all", 2 * model.moe_layers, 0.0, sent, KernelTime(seconds, "link", known))

    def _hand_on(self, nbytes: float) -> Operation:
        """Hidden states from each stage to the next; the chips of a stage send a part each."""
        deployment = self.deployment
        part = nbytes / deployment.tp
        seconds = 0.0
        for stage in range(1, deployment.pp):
            if stage * deployment.width % deployment.chips_per_node:
                seconds += self.kernels.allreduce(part, 2).seconds  # of two chips: each sends all of it
            else:
                seconds += NETWORK_FLOOR_S + part / self.network
        calls = deployment.pp - 1
        return operation("hand on", calls, 0.0, part, KernelTime(seconds / calls, "link"))
