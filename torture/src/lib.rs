//! Crash, power-cut and fault tests of the store; never a dependency of the product.

pub mod vfs;
