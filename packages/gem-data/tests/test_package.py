import gem_data


def test_version_is_semantic():
    assert len(gem_data.__version__.split(".")) == 3
