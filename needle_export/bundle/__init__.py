"""Publishing folders whole or not at all, and the files that go in and out beside the model."""
