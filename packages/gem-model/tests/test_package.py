import gem_model


def test_version_is_semantic():
    assert len(gem_model.__version__.split(".")) == 3
