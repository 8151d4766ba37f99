import gem_parallel


def test_version_is_semantic():
    assert len(gem_parallel.__version__.split(".")) == 3
