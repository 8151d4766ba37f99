import gem_lowprec


def test_version_is_semantic():
    assert len(gem_lowprec.__version__.split(".")) == 3
