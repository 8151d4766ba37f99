import gem_kernels


def test_version_is_semantic():
    assert len(gem_kernels.__version__.split(".")) == 3
