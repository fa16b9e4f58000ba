"""apex's amp at O1 against the suites that every adapter passes, as far as apex's API goes."""

import pytest
import torch
from conformance.records import *  # noqa: F403
from conformance.suite import *  # noqa: F403
from test_conformance import Given

from gradlift import Journal
from gradlift.apex import amp


class ApexDriver:
    adapter = "apex"
    framework = "torch"
    CANNOT = {
        "limits": "amp.initialize has no argument for them",
        "retries": "amp.scale_loss sees one backward pass, not the batch",
        "state": "amp.state_dict is apex's: loss_scale and unskipped of each loss",
    }

    def __init__(self, rule, journal=None):
        self.journal = Journal(journal) if journal else None
        self.net = torch.nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(2)})
        sgd = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.net, self.optimizer = amp.initialize(
            self.net, sgd, verbosity=0, rule=rule, journal=self.journal
        )
        self.scaler = amp._amp_state.scaler

    def step(self, loss, grads):
        return self.window([(loss, grads)])

    def half(self, loss, grads):
        return self.window([(loss, grads)], torch.float16)

    def window(self, batches, dtype=torch.float32):
        self.optimizer.zero_grad()
        for i, (loss, grads) in enumerate(batches):
            given = Given.apply(*self.net.values(), torch.tensor(loss, dtype=dtype), grads)
            more = i + 1 < len(batches)
            with amp.scale_loss(given, self.optimizer, delay_unscale=more) as scaled:
                if grads:
                    scaled.backward()
        self.optimizer.step()
        result = self.scaler.result
        params = {n: w.detach().numpy() for n, w in self.net.items()}
        return result.stepped, result.cause, self.scaler.get_scale(), params

    @property
    def result(self):
        return self.scaler.result

    @property
    def skipped_steps(self):
        return self.scaler.skipped_steps

    def close(self):
        if self.journal is not None:
            self.journal.close()


@pytest.fixture
def Driver():
    return ApexDriver
