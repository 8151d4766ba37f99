import gem_train


def test_version_is_semantic():
    assert len(gem_train.__version__.split(".")) == 3
